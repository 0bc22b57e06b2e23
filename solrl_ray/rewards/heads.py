"""The head of ImageReward and the aesthetic predictor: linear layers, with only dropout between them."""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS = (1024, 128, 64, 16, 1)
DROPOUT_AFTER = {1024: 0.2, 128: 0.2, 64: 0.1}


class ScoreHead(nn.Module):
    """features-1024-128-64-16-1, without activations, as published. Parameters have the published names."""

    def __init__(self, features: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((features, *WIDTHS), WIDTHS, strict=False):
            layers.append(nn.Linear(inputs, outputs))
            if outputs in DROPOUT_AFTER:
                layers.append(nn.Dropout(DROPOUT_AFTER[outputs]))
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """[B, features] to [B]."""
        scores: Tensor = self.layers(features)
        return scores.squeeze(-1)
