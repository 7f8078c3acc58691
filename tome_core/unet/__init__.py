"""The wraps inside a UNet: its forward, its transformers, its blocks and their parts."""
