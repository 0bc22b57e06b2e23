"""NVFP4 and FP8: number formats, the choice of layers to quantise, and the attestation of a worker's arithmetic."""
