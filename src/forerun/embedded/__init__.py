"""Models small enough to live in the package: `target/`, `small/`, and `prompts.jsonl`. See README.md."""
