"""Models of the transformers package, built from a config without any download: one recording equals the torch loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import tfnb
from tests.models.check import Draw, Objective, check
from tests.models.test_models import floats, ids, in_modes, inputs, padding
from tfnb.errors import BranchChanged, ShapeError

OFF = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


def called(*names: str) -> Objective:
    """The model's own loss, its inputs passed by these names; a padding mask is turned into 1 for what counts."""

    def objective(model: nn.Module, *args: torch.Tensor) -> tuple[Any, torch.Tensor]:
        out = model(**{name: (~x).long() if x.dtype == torch.bool else x for name, x in zip(names, args, strict=True)})
        return out.logits, out.loss

    return objective


def bert(**kwargs: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=3, problem_type="single_label_classification", **OFF, **kwargs,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2(**kwargs: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=12, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=0, eos_token_id=0, **kwargs,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(**kwargs: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, use_cache=False, **kwargs,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def vit(**kwargs: Any) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        num_labels=3, **OFF, **kwargs,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def t5(**kwargs: Any) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=30, d_model=12, d_kv=6, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, **kwargs,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=30, dim=12, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=16, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=3, problem_type="single_label_classification",
    )  # fmt: skip
    return transformers.DistilBertForSequenceClassification(config)


def roberta() -> nn.Module:
    config = transformers.RobertaConfig(
        vocab_size=30, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=20, num_labels=3, **OFF,
    )  # fmt: skip
    return transformers.RobertaForTokenClassification(config)


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=30, hidden_size=12, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=12,
        max_position_embeddings=16, dropout=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(
        vocab_size=30, hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


def mistral() -> nn.Module:
    config = transformers.MistralConfig(
        vocab_size=30, hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, max_position_embeddings=16, sliding_window=4, use_cache=False,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config)


def clip() -> nn.Module:
    small = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**small, "vocab_size": 30, "max_position_embeddings": 16, "eos_token_id": 29},
        vision_config={**small, "image_size": 8, "patch_size": 4}, projection_dim=6,
    )  # fmt: skip
    return transformers.CLIPModel(config)


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, num_labels=3)
    return transformers.ConvNextForImageClassification(config)


def matched(model: nn.Module, tokens: torch.Tensor, images: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """As the package's own loss, with the size of a tensor in the place of its `len`, which is a plain number."""
    logits = model(input_ids=tokens, pixel_values=images).logits_per_image
    pairs = torch.arange(logits.shape[0])
    return logits, (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.t(), pairs)) / 2


TEXT = inputs(ids(30, 6), padding(6), ids(30, 6))

CASES: dict[str, tuple[Callable[..., nn.Module], Objective, Draw]] = {
    "bert": (bert, called("input_ids", "attention_mask", "labels"), inputs(ids(30, 6), padding(6), ids(3))),
    "gpt2": (gpt2, called("input_ids", "labels"), inputs(ids(30, 6), ids(30, 6))),
    "gpt2, eager attention": (
        lambda: gpt2(attn_implementation="eager"), called("input_ids", "labels"), inputs(ids(30, 6), ids(30, 6))
    ),
    "llama": (llama, called("input_ids", "attention_mask", "labels"), TEXT),
    "t5": (t5, called("input_ids", "attention_mask", "labels"), TEXT),
    "vit": (vit, called("pixel_values", "labels"), inputs(floats(3, 8, 8), ids(3))),
    "distilbert": (distilbert, called("input_ids", "attention_mask", "labels"), inputs(ids(30, 6), padding(6), ids(3))),
    "roberta": (
        roberta, called("input_ids", "attention_mask", "labels"), inputs(ids(30, 6, low=2), padding(6), ids(3, 6))
    ),
    "opt": (opt, called("input_ids", "attention_mask", "labels"), TEXT),
    "gpt-neox": (neox, called("input_ids", "labels"), inputs(ids(30, 6), ids(30, 6))),
    "mistral": (mistral, called("input_ids", "labels"), inputs(ids(30, 6), ids(30, 6))),
    "clip": (clip, matched, inputs(ids(30, 6), floats(3, 8, 8))),
    "convnext": (convnext, called("pixel_values", "labels"), inputs(floats(3, 16, 16), ids(3))),
}  # fmt: skip


EXACT = {"vit", "gpt-neox", "clip"}
SLOW = {
    "gpt2, eager attention", "vit", "roberta", "opt", "gpt-neox", "mistral", "clip", "t5", "distilbert", "llama",
}  # fmt: skip


# the masks of the package depend on whether any place is padded: in these batches some always is
@pytest.mark.filterwarnings("ignore:.*Python took the (True|False) branch of a recorded value")
@pytest.mark.parametrize(("name", "training"), in_modes(CASES, SLOW, SLOW | {"bert"}))
def test_model(name: str, training: bool) -> None:
    make, objective, draw = CASES[name]
    check(make(), objective, draw, training=training, exact=name in EXACT)


def test_batch_without_padding_is_refused_by_what_was_recorded_with_padding() -> None:
    model = bert().eval()
    with pytest.warns(UserWarning, match="Python took the False branch"), tfnb.record():
        tokens, mask = tfnb.placeholder(torch.ones(2, 4, dtype=torch.long)), tfnb.placeholder(torch.eye(2, 4) + 1 > 1)
        logits = model(input_ids=tokens, attention_mask=mask).logits
    with pytest.raises(BranchChanged, match="was recorded with False"):
        tfnb.run(logits, {tokens: torch.ones(3, 4, dtype=torch.long), mask: torch.ones(3, 4, dtype=torch.bool)})


def kept(side: str, dtype: torch.dtype, rows: int, time: int = 6) -> torch.Tensor:
    """An attention mask: true where a row has a token; every row is padded."""
    count, places = torch.randint(2, time, (rows, 1)), torch.arange(time)
    return (places < count if side == "right" else places >= time - count).to(dtype)


@pytest.mark.filterwarnings("ignore:.*Python took the False branch of a recorded value")
@pytest.mark.parametrize(  # each pair of them once for each model
    ("attention", "side", "dtype"),
    [
        ("sdpa", "right", torch.int64), ("sdpa", "left", torch.bool), ("eager", "right", torch.bool),
        ("eager", "left", torch.int64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_padding_masks_of_both_sides_and_kinds_run_at_other_batches(
    make: Callable[..., nn.Module], attention: str, side: str, dtype: torch.dtype
) -> None:
    model = make(attn_implementation=attention).eval()
    with tfnb.record():
        tokens = tfnb.placeholder(torch.randint(2, 30, (4, 6)))
        mask = tfnb.placeholder(kept(side, dtype, 4))
        logits = model(input_ids=tokens, attention_mask=mask).logits
    for rows in (4, 3, 7):
        batch, keep = torch.randint(2, 30, (rows, 6)), kept(side, dtype, rows)
        got, want = tfnb.run(logits, {tokens: batch, mask: keep}), model(input_ids=batch, attention_mask=keep).logits
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-6)


def test_own_loss_of_clip_asks_for_len_and_says_that_the_batch_is_fixed() -> None:
    model = clip().eval()
    words, images = torch.randint(30, (4, 6)), torch.randn(4, 3, 8, 8)
    said = r"size B became the constant 4 at (.|\n)*asked in(.|\n)*len\(logits\)"
    with pytest.warns(UserWarning, match=said), tfnb.record():
        tokens, pixels = (tfnb.placeholder(t, shape=("B", *t.shape[1:])) for t in (words, images))
        loss = model(input_ids=tokens, pixel_values=pixels, return_loss=True).loss
    want = model(input_ids=words, pixel_values=images, return_loss=True).loss
    torch.testing.assert_close(tfnb.run(loss, {tokens: words, pixels: images}), want.detach())
    with pytest.raises(ShapeError, match=r"shape \(3, 6\)"):
        tfnb.run(loss, {tokens: words[:3], pixels: images[:3]})
