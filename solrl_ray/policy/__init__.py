"""The policy: LoRA adapters on a frozen transformer, their decay and average, merging, saving, digests, files of other
tools.
"""
