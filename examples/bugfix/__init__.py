"""BugFix: a gym in which a tiny policy repairs one-bug programs with the tools `run`, `edit` and `submit`.

- `language`: the mini-language of the programs and its bounded interpreter;
- `tasks`: seeded one-bug programs with hidden tests: 20 for training, 10 held out, any number for practice;
- `tokenizer`: one id per word;
- `environment`: the episodes;
- `demonstrations`: scripted, deliberately imperfect episodes for the imitation warm-up;
- `model`: the policy network, built from code.
"""
