"""Differential equations, operators, symmetries, Gaussian processes, forecasts."""

import torch
import torch.nn.functional as F
from scripts import Run, script
from torch import nn, optim


def ode(run: Run, method):
    """examples/ode_demo.py: a spiral, by the script's ODEFunc; odeint is called by a module here, so that it's wrapped."""
    from torchdiffeq import odeint

    class ODEFunc(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
            for m in self.net.modules():
                if isinstance(m, nn.Linear):
                    nn.init.normal_(m.weight, mean=0, std=0.1)
                    nn.init.constant_(m.bias, val=0)

        def forward(self, t, y):
            return self.net(y**3)

    func = run.wrap(ODEFunc())
    optimizer = optim.RMSprop(func.parameters(), lr=1e-3)
    true_y = torch.randn(12, 20, 1, 2)
    for _ in range(run.steps):
        optimizer.zero_grad()
        predicted = odeint(func, true_y[0], torch.linspace(0.0, 1.0, 12), method=method)
        loss = torch.mean(torch.abs(predicted - true_y))
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("torchdiffeq==0.2.5", line="func = ORTModule(ODEFunc())")
def torchdiffeq_rk4(run: Run):
    ode(run, "rk4")


@script("torchdiffeq==0.2.5", line="func = ORTModule(ODEFunc())")
def torchdiffeq_dopri5(run: Run):
    ode(run, "dopri5")


@script("neuraloperator==2.0.0")
def neuraloperator_fno(run: Run):
    """A Fourier neural operator on Darcy flow's sizes, with the library's relative loss and optimizer."""
    from neuralop.losses import LpLoss
    from neuralop.models import FNO

    model = run.wrap(FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2))
    optimizer, criterion = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4), LpLoss(d=2, p=2)
    for n in run.sizes(4, 3):
        optimizer.zero_grad()
        loss = criterion(model(torch.randn(n, 1, 16, 16)), torch.randn(n, 1, 16, 16))
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("e3nn==0.6.0")
def e3nn_simple_network(run: Run):
    """e3nn.nn.models.v2106: point clouds of changing sizes, messages in spherical harmonics."""
    from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork

    model = run.wrap(SimpleNetwork("2x0e", "1x0e", max_radius=2.0, num_neighbors=4.0, num_nodes=6.0, mul=4, layers=1, lmax=1))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    for i in range(run.steps):
        batch = torch.arange(3).repeat_interleave(5 + i % 3)
        data = dict(pos=torch.randn(len(batch), 3), x=torch.randn(len(batch), 2), batch=batch)
        optimizer.zero_grad()
        loss = F.mse_loss(model(data), torch.randn(3, 1))
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("gpytorch==1.15.2", replaced="data")
def gpytorch_exact_gp(run: Run):
    """The tutorial of simple regression: forward gives a distribution over the training points."""
    import gpytorch

    class ExactGPModel(gpytorch.models.ExactGP):
        def __init__(self, train_x, train_y, likelihood):
            super().__init__(train_x, train_y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    train_x = torch.linspace(0, 1, 30)
    train_y = torch.sin(train_x * 6.28) + torch.randn(30) * 0.2
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = run.wrap(ExactGPModel(train_x, train_y, likelihood))
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    for _ in range(run.steps):
        optimizer.zero_grad()
        loss = -mll(model(train_x), train_y)
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("vector-quantize-pytorch==1.32.0", requires=("einops", "einx"))
def vector_quantize(run: Run):
    """A code book with moving averages, updated in forward, between an encoder and a decoder."""
    from vector_quantize_pytorch import VectorQuantize

    class Model(nn.Module):  # as in the library's examples/autoencoder.py
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Conv2d(1, 8, 3, 2, 1), nn.ConvTranspose2d(8, 1, 4, 2, 1)
            self.quantizer = VectorQuantize(dim=8, codebook_size=16, accept_image_fmap=True)

        def forward(self, x):
            quantized, indices, commitment = self.quantizer(self.encoder(x))
            return self.decoder(quantized).clamp(-1, 1), indices, commitment

    model = run.wrap(Model())
    optimizer = optim.AdamW(model.parameters(), lr=3e-4)
    for n in run.sizes(4, 3):
        optimizer.zero_grad()
        x = torch.rand(n, 1, 16, 16)
        out, _, commitment = model(x)
        loss = (out - x).abs().mean() + 10 * commitment.sum()
        loss.backward()
        optimizer.step()
        run.step(loss)


@script("denoising-diffusion-pytorch==2.3.4", line="diffusion = ORTModule(diffusion)", requires=("einops",))
def denoising_diffusion(run: Run):
    """GaussianDiffusion around a Unet: forward draws time and noise and gives the loss."""
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    unet = Unet(dim=8, dim_mults=(1, 2), flash_attn=False, attn_dim_head=8, attn_heads=2)
    diffusion = run.wrap(GaussianDiffusion(unet, image_size=16, timesteps=100))
    optimizer = optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99))
    for n in run.sizes(2, 1):
        optimizer.zero_grad()
        loss = diffusion(torch.rand(n, 3, 16, 16))
        loss.backward()
        nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
        optimizer.step()
        run.step(loss)


@script("diffusers==0.42.1")
def diffusers_unet(run: Run):
    """examples/unconditional_image_generation: UNet2DModel and the loss on the noise of a DDPMScheduler."""
    from diffusers import DDPMScheduler, UNet2DModel

    model = run.wrap(UNet2DModel(sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
                                 block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                                 up_block_types=("AttnUpBlock2D", "UpBlock2D")))
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
    for n in run.sizes(2, 1):
        clean, noise = torch.randn(n, 3, 16, 16), torch.randn(n, 3, 16, 16)
        timesteps = torch.randint(0, 1000, (n,))
        output = model(scheduler.add_noise(clean, noise, timesteps), timesteps).sample
        loss = F.mse_loss(output.float(), noise.float())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)


@script("opacus==1.6.0", line="model = ORTModule(model), before make_private")
def opacus_private(run: Run):
    """Differential privacy: hooks on the layers keep each sample's gradients."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model = run.wrap(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(40 * run.steps, 12), torch.randint(0, 3, (40 * run.steps,)))
    loader = DataLoader(data, batch_size=40)
    private, optimizer, loader = PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=loader,
                                                              noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(private(x), y)
        loss.backward()
        optimizer.step()
        run.step(loss)
