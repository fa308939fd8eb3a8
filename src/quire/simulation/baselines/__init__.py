"""What the paper compares with (3.6.1), as parts of this engine: another KV cache manager, another admission rule."""
