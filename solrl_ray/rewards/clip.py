"""CLIPScore, PickScore and CLIP for edits: cosine of a CLIP model's features of an image and of its prompt.

CLIPScore: Hessel et al. 2021. PickScore: Kirstain et al. 2023, arXiv 2305.01569; a CLIP-H fine-tuned on people's
choices between two images.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPModel, CLIPTokenizer, ImageProcessingMixin

from solrl_ray.config.rewards import RewardConfig
from solrl_ray.errors import RewardError, UserError
from solrl_ray.models import paths
from solrl_ray.records import SampleShape
from solrl_ray.rewards import checkpoints
from solrl_ray.rewards.base import CheckpointReward, Keys
from solrl_ray.rewards.preprocessing import CLIP_SIZE, Preprocessing
from solrl_ray.rewards.texts import Texts

SCALE = 26.0
"""Divisor by which Flow-GRPO and its descendants scale PickScore to about 1."""


class CLIPReward(CheckpointReward):
    """Cosines by a transformers `CLIPModel`, in float32.

    All images of a call are one forward. Each text is encoded once, alone, and its features are cached. Prompts that
    are too long for the text encoder are truncated; a warning counts them.
    """

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        folder, processor = self.folders(config, keys)
        self._preprocessing = self._read_preprocessing(config, folder, processor, keys)
        self._model = self._frozen(paths.load_weights(CLIPModel, folder, keys("path"), dtype=torch.float32))
        self._tokenizer = paths.load_tokenizer(CLIPTokenizer, processor, keys("base" if config.base else "path"))
        self._max_tokens: int = self._model.config.text_config.max_position_embeddings
        self._texts = Texts(name, self._text_features, self._count_tokens, self._max_tokens)

    @classmethod
    def check(cls, config: RewardConfig, keys: Keys, shapes: Sequence[SampleShape]) -> None:
        folder, processor = cls.folders(config, keys)
        check_sizes(cls._read_preprocessing(config, folder, processor, keys), folder, keys("path"), shapes)

    @classmethod
    def folders(cls, config: RewardConfig, keys: Keys) -> tuple[Path, Path]:
        """Folders of the model, and of its tokenizer and image processor."""
        model = [checkpoints.CONFIG, checkpoints.TRANSFORMERS_WEIGHTS]
        processor = [checkpoints.CLIP_TOKENIZER, checkpoints.IMAGE_PROCESSOR]
        if not config.base:
            both = clip_folder(config.path, [*model, *processor], keys("path"), config.kind)
            return both, both
        folder = clip_folder(config.path, model, keys("path"), config.kind)
        return folder, checkpoints.folder(config.base, processor, keys("base"))

    @classmethod
    @abstractmethod
    def _read_preprocessing(cls, config: RewardConfig, folder: Path, processor: Path, keys: Keys) -> Preprocessing:
        """The preprocessing, read from the folders of the model and of its image processor."""

    def cosine(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """cos(image, text), [B] in [-1, 1], on the reward's device."""
        return (self._image_features(images) * self._texts(prompts)).sum(dim=-1)

    def _image_features(self, images: Tensor) -> Tensor:
        """Normalised features of images, [B, projection], on the reward's device."""
        pixels = self._preprocessing(images.to(self._device, torch.float32))
        return F.normalize(self._model.get_image_features(pixel_values=pixels).pooler_output, dim=-1)

    def _count_tokens(self, prompt: str) -> int:
        return len(self._tokenizer(prompt, verbose=False).input_ids)

    def _text_features(self, prompt: str) -> Tensor:
        """Normalised features of a prompt, float32 [projection]."""
        cut = {"truncation": True, "max_length": self._max_tokens}
        tokens = self._tokenizer(prompt, return_tensors="pt", **cut).input_ids
        features = self._model.get_text_features(input_ids=tokens.to(self._device)).pooler_output
        return F.normalize(features[0], dim=-1)


class CLIPScore(CLIPReward):
    """cos(image, text) in [-1, 1]: ``logits_per_image / logit_scale`` on the diagonal.

    ``preprocessing: checkpoint`` follows the checkpoint's image processor, without rounding to 8 bits. ``preprocessing:
    torchvision`` reproduces the published figures of the Flow-GRPO family: ``Resize`` (bilinear, antialiased) and
    ``CenterCrop`` of the float tensor, whatever the checkpoint's settings.
    """

    @classmethod
    def _read_preprocessing(cls, config: RewardConfig, folder: Path, processor: Path, keys: Keys) -> Preprocessing:
        if config.preprocessing == "torchvision":
            size = image_size(folder, keys("path"))
            return Preprocessing.torchvision(size, interpolation="bilinear", eight_bit=False)
        return read_preprocessing(processor, keys("path"), eight_bit=False)

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.cosine(images, prompts)


class CLIPEdit(CLIPScore):
    """cos(image, text) + `reference_weight` · cos(image, reference): rewards following the text and keeping the image.

    InstructPix2Pix (arXiv 2211.09800, section 4.2) compares edits by these two cosines.
    """

    def __init__(self, config: RewardConfig, device: torch.device | str, *, keys: Keys, name: str) -> None:
        super().__init__(config, device, keys=keys, name=name)
        self._weight = config.reference_weight

    def compute(self, images: Tensor, prompts: Sequence[str], reference: Tensor | None = None) -> Tensor:
        """Raises `RewardError` if the prompts have no reference."""
        if reference is None:
            raise RewardError(f"Reward {self.name} needs a reference image of each prompt; these prompts have none.")
        features = self._image_features(images)
        is_shared = reference.stride(0) == 0  # expanded: all samples are of one prompt (`rollout.sampler`)
        kept = (features * self._image_features(reference[:1] if is_shared else reference)).sum(dim=-1)
        return (features * self._texts(prompts)).sum(dim=-1) + self._weight * kept


class PickScore(CLIPReward):
    """cos(image, text) · exp(logit_scale) / 26; multiply by 26 to get the paper's figures.

    `path` is the model; `base` is the checkpoint it was trained from, with tokenizer and image processor. Images are
    rounded to 8 bits and resized as in Pillow, so pixels equal those of the published pipelines.
    """

    @classmethod
    def _read_preprocessing(cls, config: RewardConfig, folder: Path, processor: Path, keys: Keys) -> Preprocessing:
        return read_preprocessing(processor, keys("base" if config.base else "path"), eight_bit=True)

    def compute(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.cosine(images, prompts) * self._model.logit_scale.exp() / SCALE


def read_preprocessing(folder: Path, key: str, *, eight_bit: bool) -> Preprocessing:
    """The preprocessing of a checkpoint's image processor.

    Raises UserError naming `key` if its settings cannot be read or are not supported.
    """
    try:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(str(folder))
        return Preprocessing.from_config(settings, eight_bit=eight_bit)
    except (OSError, ValueError) as error:
        raise UserError(paths.unreadable(folder, "its image processor", key, error)) from error


def check_sizes(preprocessing: Preprocessing, folder: Path, key: str, shapes: Sequence[SampleShape]) -> None:
    """Raise UserError naming `key` if preprocessed images of one of these shapes do not fit the vision tower."""
    side = image_size(folder, key)
    for shape in shapes:
        try:
            size = tuple(preprocessing(torch.zeros(1, 3, shape.height, shape.width)).shape[2:])
        except ValueError as error:
            raise UserError(f"{key} names a reward that cannot score the model's images: {error}.") from error
        if size != (side, side):
            raise UserError(
                f"{key} names a reward whose image processor gives {size[0]} x {size[1]} pixels for the model's "
                f"{shape.height} x {shape.width}, but its network takes {side} x {side}."
            )


def image_size(folder: Path, key: str) -> int:
    """Height and width of the vision tower's input, pixels."""
    vision = paths.read_json(folder, "config.json", key).get("vision_config") or {}
    return int(vision.get("image_size", CLIP_SIZE))


def clip_folder(path: str, files: Sequence[tuple[str, ...]], key: str, kind: str) -> Path:
    """The folder of a CLIP checkpoint with `files`; see `checkpoints.folder`.

    Raises UserError naming `key` if files are missing, or if it is another kind of model.
    """
    config = checkpoints.find(paths.checkpoint(path, key), "config.json")
    if config is not None:
        checkpoints.check_type(config.parent, ["clip"], path, key, kind, "openai/clip-vit-large-patch14")
    return checkpoints.folder(path, files, key)
