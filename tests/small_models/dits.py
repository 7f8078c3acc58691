"""Tiny transformers of diffusers' real classes, by name, because an older diffusers lacks some, and a call of each."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import diffusers
import torch
import torch.nn.functional as F
from torch import nn

from tome_core.models.transformer import TIMES

# settings that merge as hard as a preset's early steps
STRONG = {"ratio": 15 / 16, "side": "kv", "metric": "keys+values", "sx": 4, "sy": 4, "use_rand": False}
WORDS, SIDE = 20, 32  # text tokens; tokens along a picture's side
FILM = 3 * 16 * 16  # tokens of three frames
Arguments = dict[str, Any]


class Tiny(NamedTuple):
    """kind: a class; settings: those other than `SIZES`; arguments: makes a call's. first, count: the picture's tokens
    among others. gain: of the weights, if attention would hardly show in the output."""

    kind: str
    settings: dict[str, Any]
    arguments: Callable[[], Arguments]
    first: int = 0
    count: int = SIDE**2
    gain: float = 1.0


# settings of every class that has such parameters
SIZES = {
    "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "num_single_layers": 1,
    "num_refiner_layers": 1, "in_channels": 4, "out_channels": 4, "patch_size": 2, "axes_dims_rope": (4, 4, 8),
    "rope_axes_dim": (4, 4, 8), "joint_attention_dim": 32, "cross_attention_dim": 32, "pooled_projection_dim": 32,
    "caption_projection_dim": 32, "caption_channels": 32, "cap_feat_dim": 32, "text_embed_dim": 32,
    "text_embed_2_dim": 32, "text_dim": 32, "time_embed_dim": 16, "freq_dim": 32, "ffn_dim": 64, "norm_num_groups": 1,
    "sample_size": 64, "sample_width": 32, "sample_height": 32, "pos_embed_max_size": 64, "rope_max_seq_len": 64,
    "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "axes_dims": (4, 4, 8),
    "axes_lens": (256, 64, 64), "multiple_of": 16, "timestep_guidance_channels": 16, "approximator_num_channels": 8,
    "approximator_hidden_dim": 16, "approximator_layers": 1, "num_key_value_heads": 1, "intermediate_size": 32,
    "timestep_embed_dim": 16, "text_hidden_dim": 32, "num_text_layers": 2, "text_num_attention_heads": 2,
    "text_num_key_value_heads": 1, "text_intermediate_size": 32, "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "condition_dim": 8,
    "text_emb_dim": 32, "num_routed_experts": 2, "num_activated_experts": 1, "image_embed_dim": 32,
    "image_proj_dim": 32, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16, "cross_attention_dim_t5": 32, "text_len": WORDS,
    "text_len_t5": WORDS, "max_text_seq_length": WORDS, "max_sequence_length": WORDS, "text_encoder_dim": 32,
    "motion_encoder_size": 16, "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}, "motion_style_dim": 8,
    "motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2,
}  # fmt: skip
PACKED = {"in_channels": 16, "out_channels": None, "patch_size": 1, "num_layers": 1}


def sized(kind: str, **settings: Any) -> nn.Module:
    model = getattr(diffusers, kind)
    known = inspect.signature(model.__init__).parameters
    return model(**{name: value for name, value in (SIZES | settings).items() if name in known or name not in SIZES})


def _text(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, WORDS, 32)


def _mask(seen: int = WORDS) -> torch.Tensor:
    return (torch.arange(WORDS) < seen).long()[None]


def flux_ids(height: int, width: int) -> torch.Tensor:
    """Flux's positions as its pipeline makes them, ``[height * width, 3]``."""
    grid = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros(height, width), *grid], -1).flatten(0, 1).float()


def _latent(*shape: int, time: float = 500, **more: Any) -> Arguments:
    """Arguments of a class that takes the picture or film as it is."""
    return {"hidden_states": torch.randn(shape), "encoder_hidden_states": _text(shape[0]),
            "timestep": torch.full(shape[:1], float(time)), **more}  # fmt: skip


def _packed(batch: int = 1, ids: torch.Tensor | None = None, **more: Any) -> Arguments:
    """Arguments of a class that takes packed tokens, as Flux does."""
    ids = flux_ids(SIDE, SIDE) if ids is None else ids
    return _latent(batch, len(ids), 16, time=0.5, **{"img_ids": ids, "txt_ids": torch.zeros(WORDS, 3), **more})


def _flux(batch: int = 1, ids: torch.Tensor | None = None) -> Arguments:
    return _packed(batch, ids, pooled_projections=torch.randn(batch, 32))


def _with_a_reference() -> Arguments:
    reference = flux_ids(8, 8)
    reference[:, 0] = 1
    return _flux(1, torch.cat([flux_ids(SIDE, SIDE), reference]))


def _qwen(seen: int = WORDS) -> Arguments:
    return _latent(1, SIDE * SIDE, 16, time=0.5, encoder_hidden_states_mask=_mask(seen), img_shapes=[[(1, SIDE, SIDE)]])


def _cogview() -> Arguments:
    sizes = ("original_size", "target_size", "crop_coords")
    return _latent(1, 4, 64, 64, **{name: torch.tensor([[64, 64]]) for name in sizes})


def _with_two_texts(*shape: int, **more: Any) -> Arguments:
    return _latent(*shape, encoder_attention_mask=_mask(15).float(), encoder_hidden_states_2=_text(),
                   encoder_attention_mask_2=_mask(10).float(), **more)  # fmt: skip


def _hunyuan_video(**more: Any) -> Arguments:
    return _latent(1, 4, 3, 32, 32, encoder_attention_mask=_mask(15), pooled_projections=torch.randn(1, 32),
                   guidance=torch.tensor([1000.0]), **more)  # fmt: skip


def _ltx(**more: Any) -> Arguments:
    return _latent(1, FILM, 4, num_frames=3, height=16, width=16, **more)


_FLUX = Tiny("FluxTransformer2DModel", PACKED | {"num_single_layers": 2}, _flux, WORDS)
_QWEN = Tiny("QwenImageTransformer2DModel", {"in_channels": 16}, _qwen, WORDS)
_WAN = Tiny("WanTransformer3DModel", {"patch_size": (1, 2, 2)}, partial(_latent, 1, 4, 3, 32, 32), count=FILM)
_COGVIDEO = Tiny("CogVideoXTransformer3DModel", {"sample_frames": 9}, partial(_latent, 1, 3, 4, 32, 32), WORDS, FILM)
MODELS = {
    "Flux": _FLUX,
    "Flux, two pictures": _FLUX._replace(arguments=partial(_flux, batch=2)),
    "Flux, a reference": _FLUX._replace(arguments=_with_a_reference),
    "SD3.5": Tiny("SD3Transformer2DModel", {"dual_attention_layers": (0,), "qk_norm": "rms_norm"},
                  lambda: _latent(2, 4, 64, 64, pooled_projections=torch.randn(2, 32))),
    "Qwen-Image": _QWEN,
    "Qwen-Image, padded": _QWEN._replace(arguments=partial(_qwen, 15)),
    "Wan": _WAN,
    "Z-Image": Tiny("ZImageTransformer2DModel", {"all_patch_size": (2,), "all_f_patch_size": (1,)}, lambda: {
        "x": [torch.randn(4, 1, 64, 64)], "t": torch.tensor([0.5]), "cap_feats": [_text()[0]]}),
    "Lumina 2": Tiny("Lumina2Transformer2DModel", {
        "out_channels": None, "hidden_size": 48, "num_attention_heads": 3, "num_kv_heads": 1,
        "axes_dim_rope": (4, 4, 8), "axes_lens": (128, 64, 64),
    }, lambda: _latent(1, 4, 64, 64, time=0.5, encoder_attention_mask=_mask().bool()), WORDS),
    "HunyuanVideo": Tiny("HunyuanVideoTransformer3DModel", {
        "num_layers": 1, "patch_size_t": 1, "guidance_embeds": True}, _hunyuan_video, count=FILM),
    "LTX": Tiny("LTXVideoTransformer3DModel", {"patch_size": 1},
                lambda: _ltx(encoder_attention_mask=torch.ones(1, WORDS)), count=FILM),
    "PixArt": Tiny("PixArtTransformer2DModel", {"out_channels": 8}, lambda: _latent(
        2, 4, 64, 64, added_cond_kwargs={"resolution": None, "aspect_ratio": None})),
    "Flux.2": Tiny("Flux2Transformer2DModel", PACKED | {"axes_dims_rope": (4, 4, 4, 4)}, lambda: _packed(
        img_ids=F.pad(flux_ids(SIDE, SIDE), (0, 1)), txt_ids=torch.zeros(WORDS, 4), guidance=torch.tensor([4.0])),
        WORDS),
    "Chroma": Tiny("ChromaTransformer2DModel", PACKED, _packed, WORDS),
    "Krea 2": Tiny("Krea2Transformer2DModel", {"in_channels": 16, "axes_dims_rope": (4, 6, 6)},
                   lambda: _latent(1, SIDE * SIDE, 16, time=0.5, encoder_hidden_states=torch.randn(1, WORDS, 2, 32),
                                   encoder_attention_mask=_mask().bool(),
                                   position_ids=torch.cat([torch.zeros(WORDS, 3), flux_ids(SIDE, SIDE)])), WORDS),
    "LongCat": Tiny("LongCatImageTransformer2DModel", PACKED, _packed, WORDS),
    "Ovis": Tiny("OvisImageTransformer2DModel", PACKED | {"out_channels": 16}, _packed, WORDS),
    "Bria": Tiny("BriaTransformer2DModel", PACKED, lambda: at(_packed(), 1000), WORDS),
    "Bria Fibo": Tiny("BriaFiboTransformer2DModel", PACKED | {"pooled_projection_dim": None},
                      lambda: at(_packed(text_encoder_layers=[_text(), _text()]), 1000), WORDS),
    "AuraFlow": Tiny("AuraFlowTransformer2DModel", {"pos_embed_max_size": 1024},
                     partial(_latent, 1, 4, 64, 64, time=0.5), WORDS + 8, gain=2),
    "CogView 3": Tiny("CogView3PlusTransformer2DModel", {}, _cogview, WORDS),
    "CogView 4": Tiny("CogView4Transformer2DModel", {"rope_axes_dim": (64, 64)}, _cogview, WORDS),
    "CogVideoX": _COGVIDEO,
    "ConsisID": _COGVIDEO._replace(kind="ConsisIDTransformer3DModel", settings={
        **_COGVIDEO.settings, "cross_attn_interval": 1, "is_train_face": False}),
    "Mochi": Tiny("MochiTransformer3DModel", {"out_channels": None, "pooled_projection_dim": 16}, lambda: _latent(
        1, 4, 3, 32, 32, encoder_attention_mask=_mask(15).bool()), count=FILM),
    "HiDream": Tiny("HiDreamImageTransformer2DModel", {
        "num_layers": 1, "caption_channels": [32, 32], "axes_dims_rope": (4, 6, 6), "max_resolution": (64, 64),
        "llama_layers": (0, 1), "force_inference_output": True,
    }, lambda: {
        "hidden_states": torch.randn(1, 4, 64, 48), "timesteps": torch.tensor([500.0]),
        "encoder_hidden_states_t5": _text(), "encoder_hidden_states_llama3": torch.randn(2, 1, WORDS, 32),
        "pooled_embeds": torch.randn(1, 32),
    }, count=FILM),
    "HunyuanImage": Tiny("HunyuanImageTransformer2DModel", {
        "num_layers": 1, "patch_size": (1, 1), "rope_axes_dim": (8, 8)}, partial(_with_two_texts, 1, 4, SIDE, SIDE)),
    "HunyuanVideo 1.5": Tiny("HunyuanVideo15Transformer3DModel", {"patch_size": 1},
                             lambda: _with_two_texts(1, 4, 3, 16, 16, image_embeds=torch.zeros(1, 5, 32)), count=FILM),
    "FramePack": Tiny("HunyuanVideoFramepackTransformer3DModel", {
        "num_layers": 1, "has_image_proj": True, "has_clean_x_embedder": True,
    }, lambda: _hunyuan_video(
        image_embeds=torch.randn(1, 5, 32), indices_latents=torch.arange(20, 23),
        latents_clean=torch.randn(1, 4, 2, 32, 32), indices_latents_clean=torch.tensor([0, 19]),
        latents_history_2x=torch.randn(1, 4, 2, 32, 32), indices_latents_history_2x=torch.tensor([17, 18]),
        latents_history_4x=torch.randn(1, 4, 16, 32, 32), indices_latents_history_4x=torch.arange(1, 17),
    ), 64 + 64 + 512, FILM),
    "LTX 2": Tiny("LTX2VideoTransformer3DModel", {"patch_size": 1}, lambda: _ltx(
        audio_hidden_states=torch.randn(1, 9, 4), audio_encoder_hidden_states=_text(), audio_num_frames=9), count=FILM),
    "Allegro": Tiny("AllegroTransformer3DModel", {
        "cross_attention_dim": 48, "sample_frames": 3, "attention_head_dim": 24,
    }, lambda: _latent(1, 4, 3, 32, 32, encoder_attention_mask=torch.ones(1, WORDS),
                       image_rotary_emb=([(torch.ones(16, 8), torch.zeros(16, 8))] * 3,
                                         [torch.zeros(1, FILM, dtype=torch.long)] * 3)), count=FILM),
    "HunyuanDiT": Tiny("HunyuanDiT2DModel", {"hidden_size": 32, "use_style_cond_and_image_meta_size": False},
                       lambda: _latent(1, 4, 64, 64, text_embedding_mask=_mask(), encoder_hidden_states_t5=_text(),
                                       text_embedding_mask_t5=_mask(15),
                                       image_rotary_emb=(torch.ones(SIDE**2, 16), torch.zeros(SIDE**2, 16)))),
    "DiT": Tiny("DiTTransformer2DModel", {"out_channels": 8}, lambda: {
        "hidden_states": torch.randn(2, 4, 64, 64), "timestep": torch.tensor([500, 500]),
        "class_labels": torch.tensor([1, 2]),
    }),
    "ChronoEdit": _WAN._replace(kind="ChronoEditTransformer3DModel"),
    "SkyReels": _WAN._replace(kind="SkyReelsV2Transformer3DModel"),
    "Wan VACE": Tiny("WanVACETransformer3DModel", {**_WAN.settings, "vace_layers": [0, 1], "vace_in_channels": 8},
                     lambda: _latent(1, 4, 3, 32, 32, control_hidden_states=torch.randn(1, 8, 3, 32, 32)), count=FILM),
    "Wan Animate": Tiny("WanAnimateTransformer3DModel", {
        **_WAN.settings, "in_channels": 12, "latent_channels": 4, "image_dim": 32, "inject_face_latents_blocks": 2,
    }, lambda: _latent(
        1, 12, 4, 32, 32, encoder_hidden_states_image=torch.randn(1, 5, 32),
        pose_hidden_states=torch.randn(1, 4, 3, 32, 32), face_pixel_values=torch.randn(1, 3, 9, 16, 16))),
}  # fmt: skip
PRESENT = [name for name, tiny in MODELS.items() if hasattr(diffusers, tiny.kind)]


def make(name: str, layers: int | None = None) -> tuple[nn.Module, Arguments]:
    """The model, ready for inference, and the arguments of a call. layers: number of its blocks, if not as usual."""
    kind, settings, given, *_, gain = MODELS[name]
    if layers is not None:
        known = inspect.signature(getattr(diffusers, kind).__init__).parameters
        settings = settings | {name: layers for name in ("num_layers", "n_layers") if name in known}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, arguments = sized(kind, **settings), given()
        with torch.no_grad():
            for parameter in model.parameters():  # some start as zeros, which would hide an attention
                if not parameter.any():
                    parameter.normal_(std=0.1)
                parameter.mul_(gain)
    return model.eval(), arguments


@cache
def arguments_of(name: str) -> Arguments:
    """The arguments of a call. Do not write into them."""
    return make(name)[1]


@torch.no_grad()
def call(model: nn.Module, arguments: Arguments) -> torch.Tensor:
    out = model(**arguments, return_dict=False)[0]
    return out if torch.is_tensor(out) else torch.stack(list(out))


def at(arguments: Arguments, share: float) -> Arguments:
    """The arguments of the same call at this share of its time."""
    return {key: value * share if key in TIMES else value for key, value in arguments.items()}


class Transformer(NamedTuple):
    """A family of transformers, as a `unets.Family` is one of UNets."""

    name: str

    def build(self) -> nn.Module:
        return make(self.name)[0]

    def call(self, model: nn.Module, timestep: float = 500) -> torch.Tensor:
        return call(model, at(arguments_of(self.name), timestep / 500))


def distance(picture: torch.Tensor, other: torch.Tensor) -> float:
    """The distance of two pictures, as a share of the other's size."""
    return float((picture - other).norm() / other.norm())
