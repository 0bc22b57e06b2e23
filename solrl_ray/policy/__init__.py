"""The policy: LoRA adapters on a frozen transformer, with decay, EMA, merging, digests and files of many tools."""
