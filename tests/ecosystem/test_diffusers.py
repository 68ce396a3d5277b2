"""Models of diffusers, of small random weights: their losses and every gradient are eager's, all steps in the engine.

Their configuration is a dict that refuses to be written to.
"""

import copy
import os

import pytest
import torch

import onnxtrain
from onnxtrain.ortmodule import ORTModule

diffusers = pytest.importorskip("diffusers")
DEEP = os.environ.get("ONNXTRAIN_SLOW") == "1"  # two levels of each network, not one


def down(kind, plain):
    return (kind, plain) if DEEP else (kind,)


MIDDLE = {} if DEEP else {"mid_block_type": None}
SIZES = {"block_out_channels": (8, 16) if DEEP else (8,), "norm_num_groups": 4, "layers_per_block": 1}


def unet():
    return diffusers.UNet2DModel(
        sample_size=8, down_block_types=down("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=down("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, **MIDDLE, **SIZES)


def unet_with_text():
    return diffusers.UNet2DConditionModel(
        sample_size=8, down_block_types=down("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=down("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=8, attention_head_dim=4, **MIDDLE,
        **SIZES)


def autoencoder():
    return diffusers.AutoencoderKL(
        down_block_types=down("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=down("UpDecoderBlock2D", "UpDecoderBlock2D"), latent_channels=4, **SIZES)


def transformer():
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=1 + DEEP,
        norm_num_groups=4, sample_size=8, patch_size=2, num_embeds_ada_norm=10)
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0  # labels that are dropped are others in the engine
    return model


def noisy(channels):
    return {"sample": torch.randn(2, channels, 8, 8), "timestep": torch.tensor([3, 700])}


MODELS = {
    "unet": (unet, lambda: noisy(3)),
    "unet with text": (unet_with_text, lambda: noisy(4) | {"encoder_hidden_states": torch.randn(2, 5, 8)}),
    "autoencoder": (autoencoder, lambda: {"sample": torch.randn(2, 3, 16, 16)}),
    "transformer": (transformer, lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7]),
                                          "class_labels": torch.tensor([1, 5])}),
}


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_eager(name):
    make, arguments = MODELS[name]
    torch.manual_seed(0)
    eager = make().train()
    model = ORTModule(copy.deepcopy(eager))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (eager, model)]
    for _ in range(3):
        given, losses = arguments(), []
        for m, optimizer in zip((eager, model), optimizers):
            optimizer.zero_grad()
            losses.append(m(**given).sample.square().mean())
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        largest = max(p.grad.abs().max() for p in eager.parameters() if p.grad is not None)
        for (key, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), key
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5 * largest.item(), msg=key)
        for optimizer in optimizers:
            optimizer.step()
    counts = onnxtrain.stats(model)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (3, 0, 1), counts["reasons"]
    with pytest.raises(Exception, match="update"):
        model.module.config.update(sample_size=1)


def test_save_pretrained_writes_the_files_of_the_model(tmp_path):
    model = unet()
    model.save_pretrained(tmp_path / "plain")
    ORTModule(model).save_pretrained(tmp_path / "wrapped")
    for path in (tmp_path / "plain").iterdir():
        assert path.read_bytes() == (tmp_path / "wrapped" / path.name).read_bytes(), path.name
