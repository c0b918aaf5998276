"""Models small enough to live in the package: `target/`, its drafters by kind, and `prompts.jsonl`. See README.md."""
