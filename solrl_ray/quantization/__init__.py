"""NVFP4 and FP8: number formats, which layers are quantised, and the attestation of what a worker computes with."""
