"""Training state -> a folder that stock transformers loads, replaced file by file so that a reader never sees half."""

import copy
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3ForCausalLM


def export(model: Qwen3ForCausalLM, tokenizer_folder: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = copy.deepcopy(model).to(torch.bfloat16)
    eos = model.config.eos_token_id
    stored.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos)
    # Beside the destination, so that the replacement is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as name:
        temporary = Path(name)
        stored.save_pretrained(temporary)
        shutil.copytree(tokenizer_folder, temporary, dirs_exist_ok=True)
        for path in temporary.iterdir():
            path.chmod(0o644)
            os.replace(path, folder / path.name)
