"""Version 3: the softmax between the products of the next KV tile, copies side by side; more than 32 query rows."""
