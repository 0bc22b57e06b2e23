"""Sol-RL on Ray: low-precision explorers rank, full-precision regenerators teach, a DeepSpeed group learns."""

__version__ = "0.1.0"
