"""Version 2: split-KV with products of warps (mma.sync), scores and outputs by warps of their own."""
