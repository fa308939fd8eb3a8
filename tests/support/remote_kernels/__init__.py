"""Kernels that run elsewhere: in an emulator of another processor, or on another machine."""
