"""timm's families of models, small ones, trained for three steps: in float64, loss and every gradient of every step
equal to eager's, all steps in the engine.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from timm_apart import timm

# isort: split
from timm.models import efficientnet, levit, metaformer, mlp_mixer, mobilenetv3, resnet, swin_transformer
from timm.models._efficientnet_builder import decode_arch_def

import onnxtrain
from onnxtrain.ortmodule import ORTModule

CLASSES, SIZE = 5, 32


def named(name, **options):
    return lambda: timm.create_model(name, num_classes=CLASSES, **options)


FAMILIES = {
    "resnet": lambda: resnet.ResNet(resnet.BasicBlock, (1, 1, 1, 1), num_classes=CLASSES, channels=(8, 16, 16, 16)),
    "efficientnet": lambda: efficientnet.EfficientNet(
        decode_arch_def([["ds_r1_k3_s1_e1_c8_se0.25"], ["ir_r1_k5_s2_e2_c16_se0.25"]]), CLASSES, stem_size=8,
        num_features=32),
    "mobilenetv3": lambda: mobilenetv3.MobileNetV3(
        decode_arch_def([["ds_r1_k3_s2_e1_c8_se0.25_nre"], ["ir_r1_k5_s1_e3_c16_se0.25"]]), CLASSES, stem_size=8,
        num_features=32, act_layer=torch.nn.Hardswish),
    "vit": named("test_vit", img_size=SIZE, depth=2),
    "swin": lambda: swin_transformer.SwinTransformer(SIZE, 4, num_classes=CLASSES, embed_dim=16, depths=(2, 1),
                                                     num_heads=(2, 4), window_size=4, drop_path_rate=0.0),
    "convnext": named("test_convnext", depths=(1, 1, 1, 1), dims=(8, 12, 12, 16)),
    "levit": lambda: levit.Levit(SIZE, num_classes=CLASSES, embed_dim=(16, 24), key_dim=8, depth=(1, 1),
                                 num_heads=(2, 3), attn_ratio=2, mlp_ratio=2),
    "mixer": lambda: mlp_mixer.MlpMixer(CLASSES, SIZE, patch_size=8, num_blocks=2, embed_dim=24),
    "poolformer": lambda: metaformer.MetaFormer(num_classes=CLASSES, depths=(1, 1), dims=(8, 16),
                                                token_mixers=metaformer.Pooling),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps(family):
    torch.manual_seed(0)
    plain = FAMILIES[family]().double().train()
    wrapped = ORTModule(copy.deepcopy(plain))
    images, labels = torch.randn(6, 3, SIZE, SIZE, dtype=torch.float64), torch.randint(0, CLASSES, (6,))
    optimizers = [torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9) for model in (plain, wrapped)]
    for _ in range(3):
        losses = []
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
            losses.append(F.cross_entropy(model(images), labels))
            optimizer.zero_grad()
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=0)
        for (name, a), b in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-7, atol=1e-10, msg=name)
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(plain.named_buffers(), wrapped.buffers(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-7, atol=1e-10, msg=name)
    counts = onnxtrain.stats(wrapped)
    assert (counts["engine_steps"], counts["fallback_steps"], counts["exports"]) == (3, 0, 1), counts["reasons"]
