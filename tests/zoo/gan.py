"""Adversarial training: two optimizers in turn, penalties, clipped and averaged weights."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from genlight.adapter.contract.types import StepResult

from .base import Base, mlp


class Gan(Base):
    def configure(self, ctx):
        g, d = mlp(6, 6), self.critic()
        return {
            "nets": {"generator": g, "discriminator": d},
            "opts": [self.optimizer(g.parameters()), self.optimizer(d.parameters())],
        }

    def critic(self):
        return mlp(6, 1)

    def train_step(self, batch, state, ctx):
        g, d = state["nets"].values()
        opt_g, opt_d = state["opts"]
        fake = g(batch["x"].flip(1))
        opt_d.zero_grad()
        d_loss = self.critic_loss(d, batch["x"], fake.detach())
        d_loss.backward()
        opt_d.step()
        self.after_critic(d)
        opt_g.zero_grad()
        g_loss = self.generator_loss(d, fake)
        g_loss.backward()
        opt_g.step()
        return StepResult({"g": g_loss.detach(), "d": d_loss.detach()})

    def critic_loss(self, d, real, fake):
        a, b = d(real), d(fake)
        return bce(a, torch.ones_like(a)) + bce(b, torch.zeros_like(b))

    def generator_loss(self, d, fake):
        out = d(fake)
        return bce(out, torch.ones_like(out))

    def after_critic(self, d):
        pass


class Wgan(Gan):
    """Clamps the critic's weights after its update."""

    def critic_loss(self, d, real, fake):
        return d(fake).mean() - d(real).mean()

    def generator_loss(self, d, fake):
        return -d(fake).mean()

    def after_critic(self, d):
        with torch.no_grad():
            for p in d.parameters():
                p.clamp_(-0.1, 0.1)


class WganGp(Wgan):
    def critic_loss(self, d, real, fake):
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        (grad,) = torch.autograd.grad(d(mixed).sum(), mixed, create_graph=True)
        return super().critic_loss(d, real, fake) + 10 * (grad.norm(dim=1) - 1).square().mean()

    def after_critic(self, d):
        pass


class SpectralGan(Gan):
    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    def critic(self):
        net = mlp(6, 1)
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(net[0]), net[1], net[2])


class ToggledGan(Gan):
    """Freezes the discriminator while the generator trains."""

    def generator_loss(self, d, fake):
        d.requires_grad_(False)
        return super().generator_loss(d, fake)

    def critic_loss(self, d, real, fake):
        d.requires_grad_(True)
        return super().critic_loss(d, real, fake)


class DetachedCritic(Gan):
    """The critic's value scales the generator's loss and gets no gradient: a forward call without backward."""

    def generator_loss(self, d, fake):
        with torch.no_grad():
            weight = d(fake).sigmoid()
        return (weight * fake.square().mean(1, keepdim=True)).mean()
