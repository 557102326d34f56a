"""Small vision models that follow the families of timm and diffusers."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.architectures.catalogue import architecture, images


def conv(inputs: int, outputs: int, kernel: int = 3, **options) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options),
        nn.BatchNorm2d(outputs),
    )


class Classifier(nn.Module):
    """A stem, blocks, and a pooled head."""

    def __init__(self, width: int, *blocks: nn.Module, final: int | None = None) -> None:
        super().__init__()
        self.stem = conv(3, width, stride=2)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(final or width, 3)

    def forward(self, x):
        x = self.stem(x).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, width: int, inner: nn.Module, after: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.after = inner, after or nn.ReLU()
        self.width = width

    def forward(self, x):
        return self.after(x + self.inner(x))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x):
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class DropPath(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        keep = torch.bernoulli(torch.full((len(x), 1, 1, 1), 0.7))
        return x * keep / 0.7


@architecture("ResNet", "vision")
def resnet():
    inner = [nn.Sequential(conv(8, 8), nn.ReLU(inplace=True), conv(8, 8)) for _ in range(3)]
    return Classifier(8, *(Residual(8, each) for each in inner)), images()


@architecture("ResNeXt (grouped)", "vision")
def resnext():
    inner = [nn.Sequential(conv(8, 8, 1), nn.ReLU(), conv(8, 8, groups=4), conv(8, 8, 1)) for _ in range(2)]
    return Classifier(8, *(Residual(8, each) for each in inner)), images()


@architecture("SENet", "vision")
def senet():
    return Classifier(
        8, *(Residual(8, nn.Sequential(conv(8, 8), SqueezeExcite(8))) for _ in range(2))
    ), images()


@architecture("DenseNet", "vision")
def densenet():
    class Dense(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, 4, 3, padding=1)

        def forward(self, x):
            return torch.cat([x, self.conv(self.norm(x).relu())], 1)

    return Classifier(8, Dense(8), Dense(12), Dense(16), final=20), images()


@architecture("MobileNetV2 (inverted residuals)", "vision")
def mobilenet():
    inner = [
        nn.Sequential(conv(8, 16, 1), nn.ReLU6(), conv(16, 16, groups=16), nn.ReLU6(), conv(16, 8, 1))
        for _ in range(2)
    ]
    return Classifier(8, *(Residual(8, each, nn.Identity()) for each in inner)), images()


@architecture("EfficientNet (drop path, squeeze and excite)", "vision")
def efficientnet():
    inner = [
        nn.Sequential(
            conv(8, 16, 1),
            nn.SiLU(),
            conv(16, 16, 5, groups=16),
            SqueezeExcite(16),
            conv(16, 8, 1),
            DropPath(),
        )
        for _ in range(2)
    ]
    return Classifier(8, *(Residual(8, each, nn.Identity()) for each in inner)), images()


@architecture("ConvNeXt (layer scale)", "vision")
def convnext():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8)
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
            self.scale = nn.Parameter(torch.full((8,), 1e-1))

        def forward(self, x):
            y = self.norm(self.conv(x).permute(0, 2, 3, 1))
            return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)

    return Classifier(8, Block(), Block()), images()


@architecture("NFNet (standardized weights)", "vision")
def nfnet():
    class Standardized(nn.Conv2d):
        def __init__(self):
            super().__init__(8, 8, 3, padding=1)
            self.gain = nn.Parameter(torch.ones(8, 1, 1, 1))

        def forward(self, x):
            mean = self.weight.mean((1, 2, 3), keepdim=True)
            scale = self.gain * torch.rsqrt(self.weight.var((1, 2, 3), keepdim=True) * 72 + 1e-4)
            return F.conv2d(x, (self.weight - mean) * scale, self.bias, padding=1)

    return Classifier(8, *(Residual(8, Standardized(), nn.GELU()) for _ in range(3))), images()


@architecture("MLP-Mixer", "vision")
def mixer():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
            self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            self.channels = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

        def forward(self, x):
            x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norms[1](x))

    return Patches(Block(), Block()), images()


class Patches(nn.Module):
    """Patches of 4 by 4 pixels with positions, blocks over [batch, 16, 8], and a head."""

    def __init__(self, *blocks: nn.Module, token: bool = False) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8)) if token else None
        self.positions = nn.Parameter(torch.randn(1, 16 + token, 8) * 0.02)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.blocks(x + self.positions)
        return self.head(x[:, 0] if self.token is not None else x.mean(1))


class Attention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0))
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


@architecture("Vision transformer with a class token", "vision")
def vit():
    return Patches(Attention(), Attention(), token=True), images()


@architecture("Swin (windows, shifts, relative bias)", "vision")
def swin():
    class Window(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.shift, self.attention = shift, Attention()
            self.bias = nn.Parameter(torch.zeros(4, 8))

        def forward(self, x):
            x = x.view(-1, 4, 4, 8).roll((-self.shift, -self.shift), (1, 2))
            x = x.view(-1, 2, 2, 2, 2, 8).transpose(2, 3).reshape(-1, 4, 8)
            x = self.attention(x + self.bias)
            x = x.view(-1, 2, 2, 2, 2, 8).transpose(2, 3).reshape(-1, 4, 4, 8)
            return x.roll((self.shift, self.shift), (1, 2)).view(-1, 16, 8)

    return Patches(Window(0), Window(1)), images()


@architecture("CaiT (class attention)", "vision")
def cait():
    class ClassAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 8))
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            token = self.token.expand(len(x), -1, -1)
            both = torch.cat([token, x], 1)
            return token + self.attention(token, both, both, need_weights=False)[0]

    return Patches(Attention(), ClassAttention()), images()


@architecture("Masked autoencoder", "vision")
def masked_autoencoder():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mask = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
            self.encoder, self.decoder, self.out = Attention(), Attention(), nn.Linear(8, 48)

        def forward(self, x):
            patches = self.embed(x).flatten(2).transpose(1, 2)
            order = torch.rand(patches.shape[:2]).argsort(1)
            kept = order[:, :4, None].expand(-1, -1, 8)
            shown = self.encoder(patches.gather(1, kept))
            full = self.mask.expand(len(x), 16, -1).scatter(1, kept, shown)
            target = F.unfold(x, 4, stride=4).transpose(1, 2)
            return (self.out(self.decoder(full)) - target).square().mean()

    return Masked(), images()


@architecture("U-Net with skips and upsampling", "vision")
def unet():
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.ModuleList([conv(3, 4), conv(4, 8), conv(8, 8)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(16, 4, 2, 2)])
            self.out = nn.Conv2d(8, 2, 1)

        def forward(self, x):
            first = self.down[0](x).relu()
            second = self.down[1](F.max_pool2d(first, 2)).relu()
            third = self.down[2](F.max_pool2d(second, 2)).relu()
            x = torch.cat([self.up[0](third), second], 1)
            return self.out(torch.cat([self.up[1](x), first], 1))

    return UNet(), images()


@architecture("Feature pyramid with a box head", "vision")
def pyramid():
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.levels = nn.ModuleList(conv(3 if i == 0 else 8, 8, stride=2) for i in range(3))
            self.lateral = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
            self.head = nn.Conv2d(8, 5, 3, padding=1)  # used on every level

        def forward(self, x):
            maps = []
            for level in self.levels:
                x = level(x).relu()
                maps.append(x)
            top, out = None, []
            for features, lateral in zip(reversed(maps), reversed(self.lateral), strict=True):
                merged = lateral(features)
                if top is not None:
                    merged = merged + F.interpolate(top, scale_factor=2.0)
                top = merged
                out.append(self.head(merged))
            return out

    return Pyramid(), images()


@architecture("DETR (queries, cross-attention)", "vision")
def detr():
    class Detr(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Conv2d(3, 8, 4, 4)
            self.queries = nn.Parameter(torch.randn(5, 8))
            self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
            self.classes, self.boxes = nn.Linear(8, 3), nn.Linear(8, 4)

        def forward(self, x):
            memory = self.embed(x).flatten(2).transpose(1, 2)
            found = self.transformer(memory, self.queries.expand(len(x), -1, -1))
            return {"classes": self.classes(found), "boxes": self.boxes(found).sigmoid()}

    return Detr(), images()


@architecture("Deformable sampling", "vision")
def deformable():
    class Sampler(nn.Module):
        def __init__(self):
            super().__init__()
            self.offsets, self.value = nn.Conv2d(8, 2, 3, padding=1), nn.Conv2d(8, 8, 1)

        def forward(self, x):
            line = torch.linspace(-1, 1, x.shape[-1])
            grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)
            moved = grid + 0.1 * self.offsets(x).permute(0, 2, 3, 1).tanh()
            return F.grid_sample(self.value(x), moved, align_corners=True)

    return Classifier(8, Sampler()), images()


@architecture("Diffusion U-Net with time embedding", "diffusion")
def diffusion():
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
            self.enter, self.leave = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
            self.norm, self.middle = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x):
            when = torch.randint(0, 100, (len(x),))
            angles = when[:, None] * torch.exp(-math.log(100) * torch.arange(4) / 4)
            time = self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
            noise = torch.randn_like(x)
            level = (when / 100)[:, None, None, None]
            hidden = self.enter((1 - level).sqrt() * x + level.sqrt() * noise) + time
            hidden = hidden + self.middle(F.silu(self.norm(hidden)))
            return (self.leave(hidden) - noise).square().mean()

    return Denoiser(), images()


@architecture("Diffusion transformer (adaptive norm)", "diffusion")
def dit():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8, elementwise_affine=False)
            self.modulate, self.inner = nn.Linear(8, 24), nn.Linear(8, 8)
            nn.init.zeros_(self.modulate.weight)

        def forward(self, x, condition):
            shift, scale, gate = self.modulate(F.silu(condition))[:, None].chunk(3, -1)
            return x + gate * self.inner(self.norm(x) * (1 + scale) + shift)

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.classes = nn.Conv2d(3, 8, 4, 4), nn.Embedding(4, 8)
            self.blocks, self.out = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 48)

        def forward(self, x):
            condition = self.classes(torch.arange(len(x)) % 4)
            x = self.embed(x).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = block(x, condition)
            return self.out(x)

    return Transformer(), images()


@architecture("Latent consistency (teacher without gradient)", "diffusion")
def consistency():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = conv(3, 3), conv(3, 3)
            self.teacher.requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                wanted = self.teacher(x)
            return (self.student(x + 0.1 * torch.randn_like(x)) - wanted).square().mean()

    return Student(), images()


@architecture("VQ-VAE (straight-through codes)", "generative")
def vqvae():
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Conv2d(3, 4, 4, 4), nn.ConvTranspose2d(4, 3, 4, 4)
            self.codes = nn.Embedding(8, 4)

        def forward(self, x):
            hidden = self.encoder(x).permute(0, 2, 3, 1)
            near = torch.cdist(hidden.reshape(-1, 4), self.codes.weight).argmin(-1)
            code = self.codes(near).view_as(hidden)
            passed = hidden + (code - hidden).detach()
            again = self.decoder(passed.permute(0, 3, 1, 2))
            return (again - x).square().mean() + (code - hidden.detach()).square().mean()

    return Quantized(), images()


@architecture("VAE (reparametrized)", "generative")
def vae():
    class Variational(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(768, 8), nn.Linear(4, 768)

        def forward(self, x):
            mean, log_variance = self.encoder(x.flatten(1)).chunk(2, -1)
            sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
            divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean()
            return (self.decoder(sample) - x.flatten(1)).square().mean() + 0.1 * divergence

    return Variational(), images()


@architecture("GAN (two players in one module)", "generative")
def gan():
    class Adversaries(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 768))
            self.critic = nn.Sequential(nn.Linear(768, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

        def forward(self, x):
            fake = self.generator(torch.randn(len(x), 4))
            return self.critic(fake.detach()).mean() - self.critic(x.flatten(1)).mean() + fake.square().mean()

    return Adversaries(), images()


@architecture("WGAN-GP (double backward)", "generative")
def wgan():
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(768, 8), nn.Softplus(), nn.Linear(8, 1))

        def forward(self, x):
            x = x.flatten(1).requires_grad_()
            scores = self.layers(x)
            (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
            return scores.mean() + (slope.norm(dim=1) - 1).square().mean()

    return Critic(), images()


@architecture("Coupling flow", "generative")
def flow():
    class Coupling(nn.Module):
        def __init__(self):
            super().__init__()
            self.nets = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
            )

        def forward(self, x):
            x, volume = x.flatten(1)[:, :8], 0.0
            for net in self.nets:
                left, right = x.chunk(2, 1)
                scale, shift = net(left).chunk(2, 1)
                x = torch.cat([right * scale.tanh().exp() + shift, left], 1)
                volume = volume + scale.tanh().sum(1)
            return (x.square().sum(1) / 2 - volume).mean()

    return Coupling(), images()
