"""The telephone prompts of Asterisk (CC BY-SA 3.0): English and Spanish by Allison Smith, French by
June Wallack.
"""

import wave
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

#: The folder of Debian's packages asterisk-core-sounds-*-wav.
FOLDER = "/usr/share/asterisk/sounds"
#: Class ``k`` is ``LANGUAGES[k]``.
LANGUAGES = ("en", "es", "fr")


class Prompts(Dataset[dict[str, Any]]):
    """Recordings in WAV files of 16 bits, of which the first four seconds are used.

    A sample is ``{"sound": int16 tensor of shape (samples,), "label": int from 0 to 2}``.

    Args:
        split: ``train``, or ``val`` or ``test`` with every tenth file.
        folder: Folder with a folder for each language, whose name begins with its code.

    Raises:
        ValueError: An unknown split.
        FileNotFoundError: The folder has no such files.
    """

    def __init__(self, split: str, folder: str = FOLDER) -> None:
        splits = {"train": range(2, 10), "val": range(1), "test": range(1, 2)}
        if split not in splits:
            raise ValueError(f"split={split!r}: choose one of {', '.join(splits)}")
        files = [
            (path, label)
            for label, language in enumerate(LANGUAGES)
            for path in sorted(Path(folder).glob(f"{language}*/**/*.wav"))
        ]
        if not files:
            raise FileNotFoundError(
                f"no WAV files in {folder}: apt-get install asterisk-core-sounds-{{en,es,fr}}-wav"
            )
        self.files = [file for row, file in enumerate(files) if row % 10 in splits[split]]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> dict[str, Any]:
        path, label = self.files[row]
        with wave.open(str(path)) as file:
            sound = bytearray(file.readframes(4 * file.getframerate()))
        return {"sound": torch.frombuffer(sound, dtype=torch.int16), "label": label}
