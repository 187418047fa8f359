"""Version 0: FlashAttention-2's division of the work, loads by cp.async, tiles by the device's shared memory."""
