"""Models of images, from libraries and repositories of vision."""

import os
import sys

import torch
import torch.nn.functional as F
from scripts import OneProcess, Run, definitions, images, script, tokens
from torch import nn, optim


def classify(run: Run, model, batches, optimizer=None):
    """Cross entropy of the model's logits."""
    optimizer = optimizer or optim.AdamW(model.parameters(), lr=3e-4)
    for pixels, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pixels), labels)
        loss.backward()
        optimizer.step()
        run.step(loss)


def yolo(run: Run, config):
    """DetectionModel with its loss, SGD as ultralytics' trainer uses it; the number of boxes changes."""
    os.environ["YOLO_CONFIG_DIR"] = os.environ.get("YOLO_CONFIG_DIR", "/tmp")
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel(config, ch=3, nc=4, verbose=False)
    model.args = get_cfg()
    optimizer = optim.SGD(model.parameters(), lr=1e-3, momentum=0.937, nesterov=True)
    model = run.wrap(model)
    for n in run.sizes(2, 1):
        boxes = int(torch.randint(2, 6, ()))
        batch = dict(img=torch.rand(n, 3, 64, 64), batch_idx=torch.randint(0, n, (boxes,)).float().sort().values,
                     cls=torch.randint(0, 4, (boxes, 1)).float(), bboxes=torch.rand(boxes, 4) * 0.4 + 0.3)
        loss, _ = model(batch)
        optimizer.zero_grad()
        loss.sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
        optimizer.step()
        run.step(loss.sum())


YOLO, YOLO_NEEDS = "ultralytics==8.4.190", ("torchvision", "opencv-python-headless", "ultralytics-thop")


@script(YOLO, line="trainer.model = ORTModule(trainer.model)", requires=YOLO_NEEDS)
def yolov8(run: Run):
    yolo(run, "yolov8n.yaml")


@script(YOLO, line="trainer.model = ORTModule(trainer.model)", requires=YOLO_NEEDS)
def yolo11(run: Run):
    yolo(run, "yolo11n.yaml")


CIFAR = "kuangliu/pytorch-cifar@49b7aa97b0c12fe0d4054e670403a16b6b834ddd"


def cifar(run: Run, kind):
    """main.py: SGD with momentum and weight decay, a cosine schedule. In float64, since batches of four amplify
    roundings."""
    sys.path.insert(0, str(run.folder))
    import models

    net = run.wrap(getattr(models, kind)().double())
    optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    criterion = nn.CrossEntropyLoss()
    for n in run.sizes(4, 3):
        inputs, targets = images(n, 3, 32, 10)
        optimizer.zero_grad()
        loss = criterion(net(inputs.double()), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.step(loss)


@script(CIFAR, line="net = ORTModule(net)")
def cifar_resnet18(run: Run):
    cifar(run, "ResNet18")


@script(CIFAR, line="net = ORTModule(net)")
def cifar_mobilenetv2(run: Run):
    cifar(run, "MobileNetV2")


@script("milesial/Pytorch-UNet@21d7850f2af30a9695bbeea75f3136aa538cfc4a", replaced="data")
def milesial_unet(run: Run):
    """train.py: channels last, cross entropy and Dice loss, RMSprop with momentum."""
    sys.path.insert(0, str(run.folder))
    from unet import UNet
    from utils.dice_score import dice_loss

    model = run.wrap(UNet(n_channels=3, n_classes=2).to(memory_format=torch.channels_last))
    optimizer = optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)
    criterion = nn.CrossEntropyLoss()
    for n in run.sizes(2, 1):
        pixels = torch.rand(n, 3, 32, 32).to(memory_format=torch.channels_last)
        masks = torch.randint(0, 2, (n, 32, 32))
        predicted = model(pixels)
        loss = criterion(predicted, masks)
        loss = loss + dice_loss(F.softmax(predicted, dim=1).float(), F.one_hot(masks, 2).permute(0, 3, 1, 2).float(),
                                multiclass=True)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.step(loss)


@script("facebookresearch/DiT@ed81ce2229091fd4ecc9a223645f95cf379d582b", replaced="data, latents of the VAE",
        requires=("timm", "torchvision"))
def dit(run: Run):
    """train.py: the losses of a diffusion with learned variances; its label dropout is random, and 0 here."""
    sys.path.insert(0, str(run.folder))
    from diffusion import create_diffusion
    from models import DiT

    model = run.wrap(DiT(input_size=8, hidden_size=48, depth=2, num_heads=3, num_classes=10, class_dropout_prob=0.0))
    diffusion, opt = create_diffusion(timestep_respacing=""), optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    for _ in range(run.steps):
        x, y = torch.randn(4, 4, 8, 8) * 0.18, torch.randint(0, 10, (4,))
        t = torch.randint(0, diffusion.num_timesteps, (4,))
        loss = diffusion.training_losses(model, x, t, dict(y=y))["loss"].mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.step(loss)


@script("openai/CLIP@d05afc436d78f1c48dc0dbf8e5980a9d471f35f6")
def clip(run: Run):
    """clip/model.py with the symmetric loss of the paper."""
    sys.path.insert(0, str(run.folder / "clip"))
    from model import CLIP

    model = run.wrap(CLIP(32, 32, 2, 64, 8, 16, 100, 32, 2, 2))
    optimizer = optim.Adam(model.parameters(), lr=5e-5, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    for n in run.sizes(8, 5):
        logits_per_image, logits_per_text = model(torch.randn(n, 3, 32, 32), tokens(100, n, 16))
        loss = (F.cross_entropy(logits_per_image, torch.arange(n)) + F.cross_entropy(logits_per_text, torch.arange(n))) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("facebookresearch/moco@f52ad32d8cf3553cc84667591318dee1f43f856b", replaced="data, device, process group",
        requires=("torchvision",))
def moco(run: Run):
    """The momentum update of the key encoder and the queue are inside forward. In float64, since a ResNet with batches of
    four amplifies roundings."""
    import torchvision

    builder = definitions(run.folder / "moco" / "builder.py", distributed=OneProcess,
                          replace={".cuda()": "", "torch.distributed.": "distributed."})
    model = run.wrap(builder.MoCo(torchvision.models.resnet18, dim=16, K=32).double())
    optimizer = optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    for _ in range(run.steps):
        output, target = model(im_q=torch.randn(4, 3, 32, 32).double(), im_k=torch.randn(4, 3, 32, 32).double())
        loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)


VIT, VIT_NEEDS = "vit-pytorch==1.26.14", ("einops", "torchvision")


@script(VIT, requires=VIT_NEEDS)
def vit_pytorch_vit(run: Run):
    from vit_pytorch import ViT

    classify(run, run.wrap(ViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=2, heads=2, mlp_dim=64)),
             (images(n, 3, 32, 10) for n in run.sizes(8, 5)))


@script(VIT, requires=VIT_NEEDS)
def vit_pytorch_simple_vit(run: Run):
    from vit_pytorch import SimpleViT

    classify(run, run.wrap(SimpleViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=2, heads=2, mlp_dim=64)),
             (images(n, 3, 32, 10) for n in run.sizes(8, 5)))


@script(VIT, requires=VIT_NEEDS)
def vit_pytorch_max_vit(run: Run):
    from vit_pytorch.max_vit import MaxViT

    classify(run, run.wrap(MaxViT(num_classes=10, dim_conv_stem=8, dim=8, dim_head=8, depth=(1, 1), window_size=4,
                                  dropout=0.0)), (images(n, 3, 32, 10) for n in run.sizes(4, 3)))


@script("segmentation-models-pytorch==0.6.0", requires=("timm", "torchvision"))
def segmentation_models_unet(run: Run):
    """Unet with a ResNet-18 encoder without its pretrained weights, the library's Dice loss."""
    import segmentation_models_pytorch as smp

    model = run.wrap(smp.Unet("resnet18", encoder_weights=None, classes=3, decoder_channels=(32, 16, 16, 8, 8)))
    criterion, optimizer = smp.losses.DiceLoss("multiclass"), optim.Adam(model.parameters(), lr=2e-4)
    for n in run.sizes(2, 1):
        pixels, masks = torch.rand(n, 3, 64, 64), torch.randint(0, 3, (n, 64, 64))
        loss = criterion(model(pixels), masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("monai==1.6.1")
def monai_unet(run: Run):
    """Three dimensions, residual units, Dice and cross entropy."""
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    model = run.wrap(UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=2))
    criterion, optimizer = DiceCELoss(to_onehot_y=True, softmax=True), optim.Adam(model.parameters(), 1e-3)
    for n in run.sizes(2, 1):
        loss = criterion(model(torch.randn(n, 1, 16, 16, 16)), torch.randint(0, 2, (n, 1, 16, 16, 16)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("monai==1.6.1")
def monai_autoencoder_kl(run: Run):
    """The first stage of a latent diffusion: reconstruction and the divergence of a sampled latent."""
    from monai.networks.nets import AutoencoderKL

    model = run.wrap(AutoencoderKL(spatial_dims=2, num_res_blocks=1, channels=(8, 16), attention_levels=(False, True),
                                   norm_num_groups=4))
    optimizer = optim.Adam(model.parameters(), lr=1e-4)
    for n in run.sizes(2, 1):
        pixels = torch.rand(n, 1, 16, 16)
        reconstruction, mean, sigma = model(pixels)
        divergence = 0.5 * (mean.pow(2) + sigma.pow(2) - torch.log(sigma.pow(2)) - 1).sum([1, 2, 3]).mean()
        loss = F.l1_loss(reconstruction, pixels) + 1e-3 * divergence
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("timm==1.0.31", requires=("torchvision",))
def timm_convnext(run: Run):
    """train.py's loss with label smoothing and its optimizer."""
    import timm
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2

    model = run.wrap(timm.create_model("convnext_atto", num_classes=10, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)))
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    criterion = LabelSmoothingCrossEntropy(0.1)
    for n in run.sizes(8, 5):
        pixels, labels = images(n, 3, 32, 10)
        loss = criterion(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("lightly==1.6.0", requires=("torchvision", "lightly-utils"))
def lightly_simsiam(run: Run):
    """The library's heads and loss around a backbone of torchvision."""
    import torchvision
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead

    class SimSiam(nn.Module):  # as in the library's examples
        def __init__(self):
            super().__init__()
            resnet = torchvision.models.resnet18()
            self.backbone = nn.Sequential(*list(resnet.children())[:-1])
            self.projection_head = SimSiamProjectionHead(512, 32, 16)
            self.prediction_head = SimSiamPredictionHead(16, 8, 16)

        def forward(self, x):
            z = self.projection_head(self.backbone(x).flatten(start_dim=1))
            return z.detach(), self.prediction_head(z)

    model, criterion = run.wrap(SimSiam()), NegativeCosineSimilarity()
    optimizer = optim.SGD(model.parameters(), lr=0.06)
    for n in run.sizes(4, 3):
        (z0, p0), (z1, p1) = model(torch.randn(n, 3, 32, 32)), model(torch.randn(n, 3, 32, 32))
        loss = 0.5 * (criterion(z0, p1) + criterion(z1, p0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)


@script("torchvision==0.28.0")
def torchvision_fcos(run: Run):
    """Detection with a small backbone; the library's model computes its losses from a list of targets."""
    import torchvision
    from torchvision.models.detection import FCOS

    backbone = nn.Sequential(torchvision.models.mobilenet_v3_small().features[:4], nn.Conv2d(24, 32, 1))
    backbone.out_channels = 32
    anchors = torchvision.models.detection.anchor_utils.AnchorGenerator(((8,),), ((1.0,),))
    model = run.wrap(FCOS(backbone, 4, anchor_generator=anchors, min_size=64, max_size=64).train())
    optimizer = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for n in run.sizes(2, 1):
        corner = torch.rand(n, 3, 2) * 30
        targets = [dict(boxes=torch.cat((c, c + 10 + torch.rand(3, 2) * 20), 1), labels=torch.randint(1, 4, (3,))) for c in corner]
        loss = sum(model([torch.rand(3, 64, 64) for _ in range(n)], targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss)
