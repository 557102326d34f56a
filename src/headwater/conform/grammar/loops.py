"""Features of loops: changes of weights, gradients and optimizers between steps."""

from __future__ import annotations

from headwater.conform.grammar.kinds import loop
from headwater.conform.grammar.program import KEPT, WIDTH, Code
from headwater.conform.grammar.structure import at

_STEPS = (0, 1)


@loop(step=_STEPS, mode=("no_grad", "inference_mode", "train", "with grad"), other_size=(False, True))
def evaluate(n: int, *, step: int, mode: str, other_size: bool) -> Code:
    """Return code that makes a random training loop evaluate the model between steps."""
    inputs = f"torch.ones(5, 3, {WIDTH}), torch.ones(5, 3, dtype=torch.long)" if other_size else "x, tokens"
    context = {"inference_mode": "with torch.inference_mode():", "with grad": "with torch.enable_grad():"}
    lines = [
        "model.eval()" if mode != "train" else "",
        context.get(mode, "with torch.no_grad():"),
        f'    show("evaluation {n}", model({inputs}))',
        "model.train()",
    ]
    return Code(end=at(step, *lines))


@loop(mode=("no_grad", "inference_mode", "eval"))
def evaluate_first(n: int, *, mode: str) -> Code:
    """Return code that makes a random training loop evaluate the model before its first training step."""
    context = "torch.inference_mode()" if mode == "inference_mode" else "torch.no_grad()"
    return Code(
        begin=f"""
            {"model.eval()" if mode == "eval" else ""}
            with {context}:
                show("evaluation {n}", model(torch.ones(2, 3, {WIDTH}), torch.ones(2, 3, dtype=torch.long)))
            model.train()
        """
    )


@loop(1, step=_STEPS, how=("mul_", "data mul_", "copy_", "init", "data", "setitem", "add optimizer"))
def weights_changed(n: int, other: str, *, step: int, how: str) -> Code:
    """Return code that makes a random training loop change a weight between steps."""
    weight = f"model.{other}.weight"
    line = {
        "mul_": f"with torch.no_grad(): {weight}.mul_(0.5)",
        "data mul_": f"{weight}.data.mul_(0.5)",
        "copy_": f"with torch.no_grad(): {weight}.copy_(torch.eye({WIDTH}))",
        "init": f"nn.init.orthogonal_({weight})",
        "data": f"{weight}.data = {weight}.data * 0.5",
        "setitem": f"with torch.no_grad(): {weight}[0] = 0.25",
        "add optimizer": f"with torch.no_grad(): {weight}.add_({weight}, alpha=-0.1)",
    }[how]
    return Code(end=at(step, line))


@loop(1, before=("compile", "optimizer", "backward"), how=("mul_", "data", "clamp_"))
def weights_changed_early(n: int, other: str, *, before: str, how: str) -> Code:
    """Return code that makes a random training loop change a weight at a place other than between steps.

    The places are before compile, after the optimizer was made, and in each step before the optimizer's step.
    """
    weight = f"model.{other}.weight"
    line = {
        "mul_": f"with torch.no_grad(): {weight}.mul_(0.5)",
        "data": f"{weight}.data = {weight}.data.t().contiguous()",
        "clamp_": f"{weight}.data.clamp_(-0.1, 0.1)",
    }[how]
    if before == "backward":
        return Code(gradients=line)
    return Code(setup=line) if before == "compile" else Code(begin=line)


@loop(1, how=("halved", "none", "assigned", "noise", "read", "sign"))
def gradients_changed(n: int, other: str, *, how: str) -> Code:
    """Return code that makes a random training loop read or change a gradient before the optimizer's step."""
    weight = f"model.{other}.weight"
    line = {
        "halved": f"{weight}.grad.mul_(0.5)",
        "none": f"{weight}.grad = None",
        "assigned": f"{weight}.grad = torch.ones({WIDTH}, {WIDTH})",
        "noise": f"{weight}.grad.add_(torch.randn_like({weight}.grad), alpha=0.1)",
        "read": f'show("gradient {n}", {weight}.grad.norm())',
        "sign": f"{weight}.grad = {weight}.grad.sign()",
    }[how]
    return Code(gradients=f"if {weight}.grad is not None:\n    {line}")


@loop(how=("norm", "global only", "per layer"))
def gradient_norm(n: int, *, how: str) -> Code:
    """Return code that makes a random training loop clip gradients by norm, or only compute their norm."""
    if how == "per layer":
        line = "torch.nn.utils.clip_grad_norm_(model.first.parameters(), 0.1)"
        return Code(gradients=line)
    clip = "float('inf')" if how == "global only" else "0.2"
    return Code(gradients=f'show("norm {n}", torch.nn.utils.clip_grad_norm_(model.parameters(), {clip}))')


@loop(1, how=("l2", "l1 all", "orthogonal", "gradient penalty", "between layers"))
def regularized(n: int, other: str, *, how: str) -> Code:
    """Return code that adds a term of the weights or of a gradient to a random training loop's loss."""
    weight = f"model.{other}.weight"
    line = {
        "l2": f"loss = loss + 0.1 * {weight}.square().sum()",
        "l1 all": "loss = loss + 0.01 * sum(p.abs().sum() for p in model.parameters() if p.dim())",
        "orthogonal": f"loss = loss + 0.1 * ({weight} @ {weight}.t() - torch.eye({WIDTH})).square().sum()",
        "gradient penalty": "x = x.detach().requires_grad_()\n"
        "loss = loss + torch.autograd.grad(model(x, tokens).sum(), x, create_graph=True)[0].square().mean()",
        "between layers": f"loss = loss + ({weight} - model.first.weight.t()).square().mean()",
    }[how]
    return Code(loss=line)


@loop(step=_STEPS, how=("load own", "saved", "optimizer", "both", "assign", "strict subset", "deepcopy"))
def state_dict(n: int, *, step: int, how: str) -> Code:
    """Return code that makes a random training loop save and load state dicts between steps."""
    saved = f"saved{n} = {{key: value.clone() for key, value in model.state_dict().items()}}"
    top = "import copy" if how in ("deepcopy", "optimizer", "both") else ""
    optimizer = f"state{n} = copy.deepcopy(optimizer.state_dict())"
    first, later = {
        "load own": ("model.load_state_dict(model.state_dict())", ""),
        "saved": (saved, f"model.load_state_dict(saved{n})"),
        "optimizer": (optimizer, f"optimizer.load_state_dict(state{n})"),
        "both": (
            f"{saved}\n{optimizer}",
            f"model.load_state_dict(saved{n})\noptimizer.load_state_dict(state{n})",
        ),
        "assign": (saved, f"model.load_state_dict(saved{n}, assign=True)\noptimizer = make_optimizer(model)"),
        "strict subset": (
            saved,
            f"model.load_state_dict({{'head.bias': saved{n}['head.bias']}}, strict=False)",
        ),
        "deepcopy": (
            f"saved{n} = copy.deepcopy(model.state_dict())",
            f"show_all(show, 'saved {n}', saved{n})",
        ),
    }[how]
    return Code(top=top, end=at(step, first) + ("\n" + at(step + 1, later) if later else ""))


@loop(1, when=("before", "after", "step"), how=("detach", "data", "view", "state_dict"))
def kept_reference(n: int, other: str, *, when: str, how: str) -> Code:
    """Return code that makes a random loop keep a weight's detached tensor and read it after each step."""
    value = {
        "detach": f"model.{other}.weight.detach()",
        "data": f"model.{other}.weight.data",
        "view": f"model.{other}.weight.detach()[0]",
        "state_dict": "model.state_dict()['first.weight']",
    }[how]
    keep = f"kept{n} = {value}"
    end = f'show("{KEPT}{n}", kept{n})'
    if when == "before":
        return Code(setup=keep, end=end)
    if when == "after":
        return Code(begin=keep, end=end)
    return Code(batch=at(1, keep), end=f"if step > 1:\n    {end}")


@loop(how=("all", "head first", "first rest"), kind=("SGD", "AdamW"))
def second_optimizer(n: int, *, how: str, kind: str) -> Code:
    """Return code that adds to a random training loop a second optimizer."""
    parameters = {
        "all": "[p for p in model.parameters() if p.requires_grad]",
        "head first": "list(model.head.parameters())",
        "first rest": "[model.first.weight]",
    }[how]
    return Code(
        begin=f"second{n} = torch.optim.{kind}({parameters}, lr=0.01, fused=True)",
        end=f"y = model(x, tokens)\ny.square().mean().backward()\nsecond{n}.step()\n"
        f"second{n}.zero_grad()\noptimizer.zero_grad()",
    )


@loop(kind=("StepLR", "cosine", "by hand", "OneCycle", "warm restarts"))
def schedule(n: int, *, kind: str) -> Code:
    """Return code that makes a random training loop change the learning rate."""
    if kind == "by hand":
        return Code(end="for group in optimizer.param_groups:\n    group['lr'] *= 0.5")
    made = {
        "StepLR": "StepLR(optimizer, 1, 0.5)",
        "cosine": "CosineAnnealingLR(optimizer, 3)",
        "OneCycle": "OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False)",
        "warm restarts": "CosineAnnealingWarmRestarts(optimizer, 2)",
    }[kind]
    return Code(
        begin=f"schedule{n} = torch.optim.lr_scheduler.{made}",
        end=f"schedule{n}.step()",
    )


@loop(how=("lerp", "swa", "assigned back"))
def average(n: int, *, how: str) -> Code:
    """Return code that makes a random training loop keep a moving average of the weights."""
    if how == "swa":
        shown = f"show_all(show, 'average {n}', average{n}.state_dict())"
        return Code(
            setup=f"average{n} = torch.optim.swa_utils.AveragedModel(model)",
            end=f"average{n}.update_parameters(model)\n{shown}",
        )
    update = f"""
        with torch.no_grad():
            for kept, p in zip(average{n}, model.parameters()):
                if p.is_floating_point() and kept.shape == p.shape:
                    kept.lerp_(p.to(kept.dtype), 0.1)
    """
    if how == "assigned back":
        update += f"""
            for kept, p in zip(average{n}, model.parameters()):
                if kept.shape == p.shape:
                    p.copy_(kept)
        """
    return Code(
        begin=f"average{n} = [p.detach().clone() for p in model.parameters()]",
        end=f"{_flat(update)}\nshow('average {n}', average{n}[0])",
    )


def _flat(text: str) -> str:
    import textwrap

    lines = textwrap.dedent(text).strip("\n").splitlines()
    return "\n".join(lines)


@loop(how=("sum", "separate", "first unused", "chained"))
def two_forwards(n: int, *, how: str) -> Code:
    """Return code that makes a random training loop call the model twice in a step."""
    return Code(
        loss={
            "sum": "loss = loss + model(x.flip(0), tokens).square().mean()",
            "separate": "model(x.flip(0), tokens).square().mean().backward()",
            "first unused": "unused = model(x.flip(0), tokens)",
            "chained": "loss = loss + model(torch.cat([y, y, y], -1), tokens).square().mean()",
        }[how]
    )


@loop(how=("retain", "inputs", "autograd.grad", "scaled"))
def backward_kind(n: int, *, how: str) -> Code:
    """Return code that makes a random training loop do a second backward, or scale the loss."""
    return Code(
        loss={
            "retain": "loss.backward(retain_graph=True)",
            "inputs": "loss.backward(inputs=[model.first.weight], retain_graph=True)",
            "autograd.grad": f"(grad{n},) = torch.autograd.grad(loss, model.head.weight, retain_graph=True)\n"
            f"show('grad {n}', grad{n})",
            "scaled": "loss = loss * 128",
        }[how],
        gradients="for p in model.parameters():\n    if p.grad is not None:\n        p.grad.div_(128)"
        if how == "scaled"
        else "",
    )


@loop(how=("functional_call", "func.grad", "hvp", "double backward"))
def functional(n: int, *, how: str) -> Code:
    """Return code that makes a random training loop use `torch.func` or second derivatives on the model."""
    lines = {
        "functional_call": f"""
            weights{n} = {{name: p.detach() * 0.5 for name, p in model.named_parameters()}}
            loss = loss + torch.func.functional_call(model, weights{n}, (x, tokens)).mean()
        """,
        "func.grad": f"""
            weights{n} = {{name: p.detach() for name, p in model.named_parameters()}}
            def loss{n}(weight):
                return torch.func.functional_call(
                    model, {{**weights{n}, "head.weight": weight}}, (x, tokens)
                ).square().mean()
            show("func.grad {n}", torch.func.grad(loss{n})(weights{n}["head.weight"]))
        """,
        "hvp": f"""
            wanted{n} = [p for p in (model.head.weight, model.head.bias) if p.requires_grad]
            grads{n} = torch.autograd.grad(loss, wanted{n}, create_graph=True)
            loss = loss + sum(g.square().sum() for g in grads{n})
        """,
        "double backward": f"""
            x{n} = x.detach().requires_grad_()
            (slope{n},) = torch.autograd.grad(model(x{n}, tokens).sum(), x{n}, create_graph=True)
            loss = loss + slope{n}.square().sum()
        """,
    }[how]
    return Code(loss=_flat(lines))


@loop(step=_STEPS, how=("dropped", "loss zero", "no forward", "no backward"))
def skipped(n: int, *, step: int, how: str) -> Code:
    """Return code that makes one step irregular: an extra forward or update, or no loss or gradients."""
    if how == "no forward":
        return Code(batch=at(step, "optimizer.step()"))
    if how == "no backward":
        return Code(batch=at(step, "model(x, tokens)"))
    if how == "loss zero":
        return Code(loss=at(step, "loss = loss * 0"))
    return Code(gradients=at(step, "optimizer.zero_grad()"))


@loop(precision=("bfloat16", "float16"))
def autocast_loop(n: int, *, precision: str) -> Code:
    """Return code that adds to a random training loop a second forward, under autocast."""
    return Code(
        loss=f"""
            with torch.autocast("cpu", dtype=torch.{precision}):
                half{n} = model(x, tokens)
            loss = loss + half{n}.float().square().mean()
        """
    )


@loop(size=(1, 7))
def other_batch(n: int, *, size: int) -> Code:
    """Return code that makes a random training loop use one batch of another size."""
    return Code(
        batch=at(
            1,
            f"x, tokens = torch.randn({size}, 3, {WIDTH}), torch.randint(11, ({size}, 3))",
            f"target = torch.randn({size}, 3, 2)",
        )
    )


@loop(how=("model", "pickle", "class"))
def copied(n: int, *, how: str) -> Code:
    """Return code that makes a random program copy the model, compile the original and use the copy."""
    use = {
        "model": f"loss = loss + (y - twin{n}(x, tokens).detach()).square().mean()",
        "pickle": f"show('twin {n}', twin{n}(x, tokens))",
        "class": f"twin{n}.load_state_dict(model.state_dict())\nshow('twin {n}', twin{n}(x, tokens))",
    }[how]
    return Code(top="import copy", setup=f"twin{n} = copy.deepcopy(model).eval()", loss=use)


@loop(step=_STEPS, part=("first", "head"))
def part_called(n: int, *, step: int, part: str) -> Code:
    """Return code that makes a random training loop call a layer outside of the model's forward."""
    width = WIDTH
    line = f"loss = loss + model.{part}(torch.ones(2, {width})).square().mean()"
    return Code(loss=at(step, line))


@loop(how=("toggle", "part"))
def train_mode(n: int, *, how: str) -> Code:
    """Return code that makes a random loop train with the model in eval mode at times, or a layer always."""
    return Code(batch="model.train(step % 2 == 0)" if how == "toggle" else "model.first.eval()")
