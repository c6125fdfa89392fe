"""A stand-in for flash-attn on CPU, so that peers built on it run unmodified. Not flash-attn's code; see
flash_attn_interface.py."""

from flash_attn.flash_attn_interface import flash_attn_func

__version__ = "2.8.3"
"""The version whose low-level functions are offered: peers choose their calls by it."""

__all__ = ["flash_attn_func"]
