"""Version 0: split-KV with products of warps (mma.sync), loads by cp.async, tiles by the device's shared memory."""
