"""Small problems in the forms of HumanEval and MBPP."""

import json

ADD = {
    "task_id": "own/0",
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(-1, 1) == 0\n",
    "entry_point": "add",
}
LAST = {
    "task_id": "own/1",
    "prompt": '\n\ndef last(values):\n    """Return the last."""\n',
    "canonical_solution": "    return values[-1]\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 2\n",
    "entry_point": "last",
}
SQUARE = {
    "task_id": 11,
    "text": "Write a function that squares.",
    "code": "def square(n):\n    return n * n",
    "test_list": ["assert square(2) == 4", "assert square(-3) == 9"],
}


def write_problems(path, *problems):
    """Write problems to a file, and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return path
