"""The project's interface to a diffusion model: encode, velocity (with guidance), decode.

A family is one subclass. It names the classes of its diffusers pipeline, and defines how a prompt is encoded, how the
transformer is called, and how latents enter the autoencoder. Everything else is here.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from solrl_ray.common.progress_note import progress_note
from solrl_ray.config.schema import Model
from solrl_ray.models import decoders
from solrl_ray.models.checkpoint import fingerprint, freeze
from solrl_ray.models.family_checkpoint import FamilyCheckpoint
from solrl_ray.models.libraries import no_grad, torch
from solrl_ray.records import NEGATIVE, REFERENCES, PromptEmbedding, SampleShape

if TYPE_CHECKING:
    from torch import Tensor, nn

    from solrl_ray.models.components import Component, TextEncoders


class DiffusionModel(FamilyCheckpoint, ABC):
    """A rectified-flow model: x_sigma = (1 - sigma) x0 + sigma noise, velocity = noise - x0.

    Only requested components are loaded; using another one raises `ValueError`. Modules are frozen and in eval mode.
    The state between solver steps is float32; the network computes in `dtype`. Guidance is part of the configuration:
    with `cfg` the velocities for the prompt and the negative prompt are combined; otherwise a velocity is one forward.
    """

    shape: SampleShape
    """Shape of the samples that this model takes; see `of_shape`."""
    latent_shape: tuple[int, ...]
    """Shape of one sample's state as the transformer takes it, without batch dimension."""
    image_tokens: int
    """Number of image tokens; resolution-dependent sigma schedules shift with it."""

    def __init__(
        self,
        config: Model,
        device: torch.device | str,
        modules: Mapping[Component, nn.Module],
        *,
        transformer_config: Mapping[str, Any],
        vae_config: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._together = True
        self._modules = {name: freeze(module) for name, module in modules.items()}
        self._transformer_config, self._factor = transformer_config, decoders.factor(vae_config)
        self._set_up(transformer_config)
        self._take_shape(config.shapes[0])

    @classmethod
    def load(cls, config: Model, device: torch.device | str, components: Collection[Component]) -> Self:
        """Load `components`; see `models.load`."""
        checkpoint = cls._open(config)
        transformer_config, vae_config = checkpoint.settings("transformer"), checkpoint.settings("vae")
        cls.SIZES.check(config, transformer_config, decoders.factor(vae_config))
        load_preview = decoders.preview_loader(config, vae_config, cls.DECODERS)
        dtype = getattr(torch, config.dtype)
        modules: dict[Component, nn.Module] = {}
        if "text" in components:
            modules["text"] = cls._load_text(config, checkpoint, dtype)
        if "transformer" in components:
            transformer = checkpoint.load("transformer", (cls.TRANSFORMER.__name__,), dtype)
            modules["transformer"] = cls.adapt_(transformer)
        if "vae" in components or ("preview_decoder" in components and load_preview is None):
            vae = checkpoint.load("vae", cls.DECODERS, dtype)
            full: Component = "vae" if "vae" in components else "preview_decoder"
            modules[full] = decoders.set_tiling(vae, config.decoding)
        if "preview_decoder" in components and load_preview is not None:
            modules["preview_decoder"] = decoders.set_tiling(load_preview(torch_dtype=dtype), config.decoding)
        for name, module in modules.items():
            with progress_note(f"moving {name} to {device}"):
                module.to(device)
        return cls(config, device, modules, transformer_config=transformer_config, vae_config=vae_config)

    def stock_latents(self, latents: Tensor) -> Tensor:
        """Initial noise in the format of the stock pipeline's argument."""
        return latents

    def predicted(self, latents: Tensor) -> Tensor:
        """View of the part of `latents` that the transformer predicts; the rest, such as a first frame, is given."""
        return latents

    @property
    def components(self) -> frozenset[Component]:
        """The loaded components."""
        return frozenset(self._modules)

    @property
    def transformer(self) -> nn.Module:
        """The network that `velocity` calls."""
        return self._module("transformer")

    @property
    def decoder(self) -> nn.Module:
        """The autoencoder that `decode` uses."""
        return self._module("preview_decoder" if "preview_decoder" in self._modules else "vae")

    def joined(self, other: Self) -> Self:
        """This model plus the components of `other`, which has the same configuration."""
        return self._with({**self._modules, **other._modules})

    def view(self, components: Collection[Component]) -> Self:
        """This model with only these components. Its transformer is a separate module tree over the same tensors:
        replacing a module there does not change this model.
        """
        modules = {name: self._modules[name] for name in components}
        if "transformer" in modules:
            from solrl_ray.models.components import same_tensors

            modules["transformer"] = same_tensors(modules["transformer"])
        return self._with(modules)

    def _with(self, modules: dict[Component, nn.Module]) -> Self:
        made = copy.copy(self)
        made._modules = modules
        return made

    def of_shape(self, shape: SampleShape) -> Self:
        """This model with the same components, for samples of `shape`."""
        made = copy.copy(self)
        made._take_shape(shape)
        return made

    def _take_shape(self, shape: SampleShape) -> None:
        self.shape, self._grid = shape, self.SIZES.image_grid(shape, self._factor)
        self.image_tokens = self.SIZES.image_tokens(shape, self._factor)
        self.latent_shape = self.SIZES.latent_shape(shape, self._transformer_config, self._factor)
        self._set_up_shape(*self._grid)

    def with_guidance(self, config: Model, *, together: bool = True) -> Self:
        """This model with the guidance of `config`; nothing else changes.

        Args:
            together: True computes both velocities in one forward of batch 2 B, so a sampler compiles one shape. False
                uses two forwards of B, as a learner needs: no activations of the negative prompt are kept, and v_old
                has the same bits as an equal v_theta.
        """
        made = copy.copy(self)
        made.config, made._together = config, together
        return made

    def use_transformer(self, transformer: nn.Module) -> None:
        """Use a transformer that was built from this family's `skeleton` and is already on the device."""
        self._modules["transformer"] = freeze(transformer)

    @no_grad
    def encode(self, texts: Sequence[str], micro_batch: int = 1) -> list[dict[str, Tensor]]:
        """Encode texts in batches of one fixed shape, so that an embedding depends only on its text.

        Kernels differ between shapes, so an incomplete batch is filled up. They also differ without a mask, which
        transformers drops if no row is padded. So a batch of several texts gets an empty text as an extra row.

        Returns one dict per text: name → tensor in `dtype`, without batch dimension, on the CPU.
        """
        encoded: list[dict[str, Tensor]] = []
        for first in range(0, len(texts), micro_batch):
            part = list(texts[first : first + micro_batch])
            rows = part + part[-1:] * (micro_batch - len(part)) + [""] * (micro_batch > 1)
            batch = self._encode(self._text.pipeline, rows)
            batch = {name: tensor[: len(part)].to("cpu", self.dtype) for name, tensor in batch.items()}
            # Cloned: a view of a row would keep, and send, its whole batch.
            encoded += [{name: tensor[row].clone() for name, tensor in batch.items()} for row in range(len(part))]
        return encoded

    def text_identity(self, micro_batch: int = 1) -> dict[str, str]:
        """Everything besides the text that determines the bits of `encode`: weights, settings, libraries, device.

        Reads all weights once. This takes about as long as loading them: seconds for T5-XXL.
        """
        import transformers  # late: most processes never encode

        on_gpu = self.device.type == "cuda"
        kernels = torch.cuda.get_device_name(self.device) if on_gpu else torch.get_num_threads()
        return {
            **{name: fingerprint(part) for name, part in self._text.parts.items()},
            **({"micro_batch": str(micro_batch)} if micro_batch != 1 else {}),
            "max_sequence_length": str(self.config.max_sequence_length),
            "dtype": self.config.dtype,
            "device": f"{self.device.type}/{kernels}",
            "libraries": f"torch {torch.__version__}, transformers {transformers.__version__}",
        }

    def velocity(self, latents: Tensor, sigma: float | Tensor, embedding: dict[str, Tensor]) -> Tensor:
        """Predict the velocity, with classifier-free guidance (arXiv 2207.12598) as configured. Where guidance is off,
        or outside its interval, the result is the velocity for the prompt only.

        Args:
            latents: [B, *latent_shape], any float dtype.
            sigma: noise level in [0, 1], one number or a tensor [B].
            embedding: result of `batch_embeddings`, with batch size B or 1 (one prompt for all). With `cfg` it includes
                the negative prompt, whose velocity has no gradient.

        Returns:
            float32 [B, *latent_shape].

        Raises ValueError if guidance is on and there is no negative prompt.
        """
        batch = latents.shape[0]
        if latents.shape[1:] != self.latent_shape:
            raise ValueError(f"latents are {tuple(latents.shape)}, not [B, {str(self.latent_shape)[1:-1]}]")
        sigmas = torch.as_tensor(sigma, dtype=torch.float32, device=self.device).expand(batch)
        prompts = {name: tensor.expand(batch, *tensor.shape[1:]) for name, tensor in embedding.items()}
        state = latents.to(device=self.device, dtype=self.dtype)
        own = {name: tensor for name, tensor in prompts.items() if not name.startswith(NEGATIVE)}
        cfg = self.config.cfg
        if not cfg.is_on:
            return self._velocity(state, sigmas, own).float()
        if len(prompts) != 2 * len(own):
            raise ValueError(
                "guidance needs the embedding of a negative prompt, which is missing: encode it with model.cfg set"
            )
        negative = {name: prompts[NEGATIVE + name] for name in own}
        positive, other = (velocity.float() for velocity in self._both(state, sigmas, own, negative))
        low, high = cfg.interval
        acts = ((sigmas >= low) & (sigmas <= high)).view(-1, *[1] * (positive.dim() - 1))
        return torch.where(acts, self._combined(positive, other, cfg.scale), positive)

    def _both(
        self, latents: Tensor, sigmas: Tensor, own: dict[str, Tensor], negative: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The velocities for the prompts and for the negative prompt; the latter never has a gradient."""
        if self._together:
            texts = {name: torch.cat([tensor, negative[name]]) for name, tensor in own.items()}
            twice = latents.repeat(2, *[1] * (latents.dim() - 1))
            positive, other = self._velocity(twice, sigmas.repeat(2), texts).chunk(2)
            return positive, other.detach()
        # In this order, because autocast caches casts of weights, and a cached cast must not lack its gradient.
        positive = self._velocity(latents, sigmas, own)
        with torch.no_grad():
            return positive, self._velocity(latents, sigmas, negative)

    @no_grad
    def decode(self, latents: Tensor) -> Tensor:
        """Decode clean latents [B, *latent_shape] to images [B, 3, H, W] or videos [B, 3, T, H, W], float32 in [0, 1].

        The decoder computes in `dtype`, on `model.decoding.micro_batch` images at a time. If a preview decoder is
        loaded, it is used instead of the VAE.
        """
        size = self.config.decoding.micro_batch or len(latents)
        return torch.cat([self._decode(self.decoder, part) for part in latents.split(size)])

    def batch_embeddings(self, embeddings: Sequence[PromptEmbedding]) -> dict[str, Tensor]:
        """Stack embeddings in the given order, on the device: name → tensor [B, ...] in `dtype`.

        If all embeddings are equal, the batch is an expanded view of one copy.
        """
        if not embeddings:
            raise ValueError("a batch needs at least one prompt embedding")
        names = embeddings[0].tensors.keys()
        if any(embedding.tensors.keys() != names for embedding in embeddings):
            raise ValueError("prompt embeddings with different tensors (of different families) cannot share a batch")
        one_prompt = len({embedding.digest for embedding in embeddings}) == 1
        chosen = embeddings[:1] if one_prompt else embeddings
        batch = {}
        for name in (name for name in names if name != REFERENCES):  # those are for rewards only
            # A run has one negative prompt, but with references it is encoded with those of each prompt.
            is_one = name.startswith(NEGATIVE) and not self.config.references
            rows = chosen[:1] if is_one else chosen
            stacked = torch.stack([embedding.tensors[name] for embedding in rows])
            stacked = stacked.to(device=self.device, dtype=self.dtype)
            batch[name] = stacked.expand(len(embeddings), *stacked.shape[1:])
        return batch

    # For subclasses

    def _set_up(self, transformer_config: Mapping[str, Any]) -> None:
        """Set further attributes that `_velocity` needs from the transformer's configuration."""

    def _set_up_shape(self, rows: int, columns: int) -> None:
        """Set attributes that `_velocity` needs for a grid of image tokens, such as positions."""

    @abstractmethod
    def _encode(self, pipeline: Any, texts: list[str]) -> dict[str, Tensor]:
        """Name → tensor, with a batch dimension. Shapes may depend only on the number of texts."""

    @abstractmethod
    def _velocity(self, latents: Tensor, sigmas: Tensor, embedding: dict[str, Tensor]) -> Tensor:
        """Call the transformer: latents in `dtype`, sigmas float32 [B], every embedding tensor [B, ...]."""

    def _encode_prompt(self, pipeline: Any, texts: list[str], *arguments: Any, **named: Any) -> Any:
        """Call the stock pipeline's `encode_prompt` on this device; texts are truncated as configured."""
        longest = self.config.max_sequence_length
        return pipeline.encode_prompt(texts, *arguments, device=self.device, max_sequence_length=longest, **named)

    def _call(self, *arguments: Any, **named: Any) -> Tensor:
        """Call the transformer; returns its output tensor."""
        output: Tensor = self.transformer(*arguments, **named, return_dict=False)[0]
        return output

    def _combined(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Combine two velocities for guidance, as the stock pipeline does: float32 [B, *latent_shape]."""
        return negative + scale * (positive - negative)

    def _unpacked(self, latents: Tensor) -> Tensor:
        """Latents as an image of latent cells [B, C, H, W], still normalised."""
        return latents

    def _denormalised(self, decoder: Any, latents: Tensor) -> Tensor:
        """Input of the decoder, float32: latents / scaling + shift. Some decoders have no shift, or null."""
        settings = decoder.config
        return latents / float(settings.get("scaling_factor") or 1.0) + float(settings.get("shift_factor") or 0.0)

    @property
    def _text(self) -> TextEncoders:
        encoders: Any = self._module("text")
        return encoders  # type: ignore[no-any-return]

    def _module(self, name: Component) -> nn.Module:
        if name not in self._modules:
            loaded = ", ".join(sorted(self._modules)) or "nothing"
            raise ValueError(f"component {name!r} of {self.config.path} was not loaded, only {loaded}")
        return self._modules[name]

    def _decode(self, decoder: Any, latents: Tensor) -> Tensor:
        z = self._denormalised(decoder, self._unpacked(latents.to(self.device, torch.float32)))
        images = decoder.decode(z.to(self.dtype), return_dict=False)[0]
        return (images.float() / 2 + 0.5).clamp(0, 1)
