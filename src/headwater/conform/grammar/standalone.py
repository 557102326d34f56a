"""A program with the code that runs it plain and streamed, as one script."""

from __future__ import annotations

from headwater.conform.grammar.program import Program
from headwater.conform.plans import PLANS, needs_disk

_TAIL = """\

def record(compile):
    shown = []
    run(compile, lambda name, value: shown.append((name, copied(value))))
    return shown


def copied(value):
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided:
        return value.detach().to_dense()
    return value.detach().as_subclass(torch.Tensor).clone()


if __name__ == "__main__":
    import tempfile

    import headwater

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        options = {options}
        plain = record(lambda model: model)
        streamed = record(lambda model: headwater.compile(model, headwater.backend("CSX", **options)))
    assert len(plain) == len(streamed), (len(plain), len(streamed))
    for (name, expected), (_, found) in zip(plain, streamed):
        if not torch.equal(torch.as_tensor(expected), torch.as_tensor(found)):
            raise SystemExit(f"{{name}} differs:\\nplain    {{expected}}\\nstreamed {{found}}")
    print("equal")
"""


def standalone(program: Program, plan: str) -> str:
    """Return a script that prints the first difference between a plain and a streamed run."""
    options = ", ".join(f"{name!r}: {value!r}" for name, value in PLANS[plan].items())
    if needs_disk(plan):
        options += ", 'disk': folder"
    return f"# {plan}\n{program.source()}\n{_TAIL.format(options='{' + options + '}')}"
