"""Every figure of a chapter on the throughput of reinforcement learning, computed with lit_rl.

`python examples/chapter/reproduce.py` recomputes all of them; README.md shows what came out. One module per section:

- `padding` (14.1), `budgets` (14.2), `logits` (14.3), `accumulation` (14.4), `filtering` (14.5), `accounting` (14.6),
  `design_problems` (14.7), and `design_review` (exercise 7);
- `gym`: the policy and the episodes that several sections share; `table`: rows and files; `pictures`: the figures.
"""
