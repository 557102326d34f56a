"""Losses of DINOv2, which compare the outputs of student and teacher."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models.self_supervised import DistillationConfig, KoLeoConfig
from headwater.core import whole_batch


class Distillation(nn.Module):
    """Base of the losses that distil a teacher.

    It centres and sharpens the teacher's probabilities (arXiv:2104.14294, section 3.1).

    Attributes:
        center: moving average of the teacher's scores, which is subtracted from them, [scores].
        step: number of training steps done.

    Args:
        config: section of the loss.
    """

    center: Tensor
    step: Tensor

    def __init__(self, config: DistillationConfig) -> None:
        super().__init__()
        self.config = config
        # On the CPU even if parameters are on the meta device: buffers always have values.
        self.register_buffer("center", torch.zeros(config.input_size, device="cpu"))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device="cpu"))

    @torch.no_grad()
    def targets(self, teacher: Tensor, counted: Tensor) -> Tensor:
        """Return the teacher's probabilities [..., scores]; in training, then update the center.

        Args:
            teacher: the teacher's scores, [..., scores].
            counted: 1 for scores that count in the mean, else 0, [...].
        """
        probabilities = ((teacher - self.center) / self._temperature()).softmax(-1)
        if self.training:
            number = whole_batch.total(counted.sum())
            scores = (teacher * counted.unsqueeze(-1)).flatten(0, -2).sum(0)
            mean = whole_batch.total(scores) / number.clamp_min(1)
            # If no scores count, the center does not change.
            share = (1 - self.config.center_momentum) * (number > 0)
            self.center.add_((mean - self.center) * share)
            self.step.add_(1)
        return probabilities

    def _temperature(self) -> Tensor:
        config = self.config
        steps = max(1, config.warmup_teacher_temp_steps - 1)
        done = (self.step / steps).clamp_max(1) if config.warmup_teacher_temp_steps else torch.ones(())
        rise = config.teacher_temp - config.warmup_teacher_temp
        return config.warmup_teacher_temp + rise * done.to(self.center.device)

    def log_probabilities(self, student: Tensor) -> Tensor:
        """Return the log-probabilities [..., scores] of the student's scores."""
        return (student.float() / self.config.student_temp).log_softmax(-1)


class DinoDistillationLoss(Distillation):
    """Cross-entropy of the student's views against the teacher's global views.

    It is the mean over all pairs of different views of an image (arXiv:2104.14294, section 3.1).
    """

    def forward(self, student: Tensor, teacher: Tensor, local: Tensor | None = None) -> Tensor:
        """Return the loss, a scalar.

        Args:
            student: the student's scores of the global views, [batch, views, scores].
            teacher: the teacher's scores of the global views, [batch, views, scores].
            local: the student's scores of the local views, [batch, local views, scores].
        """
        teacher = teacher.float()
        targets = self.targets(teacher, torch.ones_like(teacher[..., 0]))
        views = targets.shape[1]
        whole = torch.einsum("bvs,bws->bvw", targets, self.log_probabilities(student))
        total, pairs = whole.sum() - whole.diagonal(dim1=1, dim2=2).sum(), views * (views - 1)
        if local is not None:
            total = total + torch.einsum("bvs,bws->bvw", targets, self.log_probabilities(local)).sum()
            pairs += views * local.shape[1]
        return -total / (len(targets) * pairs)


class IBOTPatchLoss(Distillation):
    """Cross-entropy of masked patches (arXiv:2111.07832): mean over patches of a view, then over views."""

    def forward(self, teacher: Tensor, student: Tensor, masks: Tensor) -> Tensor:
        """Return the loss, a scalar.

        Args:
            teacher: the teacher's scores of the patches, [batch, views, patches, scores].
            student: the student's scores of the patches, [batch, views, patches, scores].
            masks: [batch, views, patches], True for a patch that was masked for the student.
        """
        counted = masks.float()
        targets = self.targets(teacher.float(), counted)
        losses = -(targets * self.log_probabilities(student)).sum(-1)
        return (losses * counted).sum(-1).div(counted.sum(-1).clamp_min(1)).mean()


class KoLeoLoss(nn.Module):
    """Negative logarithm of the distance to the nearest other image (arXiv:1806.03198, equation 1).

    Args:
        config: section of the loss.
    """

    def __init__(self, config: KoLeoConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, features: Tensor) -> Tensor:
        """Return the loss, a scalar: the mean over images and views.

        Neighbours are searched among the images of the same view index.

        Args:
            features: features of the views, [batch, views, width].
        """
        views = F.normalize(whole_batch.rows(features).float(), dim=-1).transpose(0, 1)
        with torch.no_grad():
            products = views @ views.mT
            # -2 is less than any product of unit vectors, so that no image is its own neighbour.
            products = products.diagonal_scatter(torch.full_like(products[..., 0], -2.0), dim1=1, dim2=2)
            nearest = products.argmax(-1, keepdim=True).expand_as(views)
        distances = F.pairwise_distance(views, views.gather(1, nearest))
        return -self.config.loss_weight * (distances + 1e-8).log().mean()


def make_loss(config: DistillationConfig | KoLeoConfig) -> nn.Module:
    """Return the loss module of a section."""
    if isinstance(config, KoLeoConfig):
        return KoLeoLoss(config)
    return IBOTPatchLoss(config) if config.name == "iBOTPatchLoss" else DinoDistillationLoss(config)
