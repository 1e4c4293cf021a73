"""SmolLM3 on a sample of Wikipedia: every fourth layer does not rotate.

What       wiki_sample.py with the decoder of SmolLM3: silu, embeddings that are not scaled, and the
           wavelength of its first stage, 5e4. Its later stages have 2e6 and 5e6, and YaRN up to
           128k, which prope.evaluate --encoding=yarn does without training.
Command    python -m prope.train --config=configs/smollm3_like.py --workdir=W \\
               --config.data.data_dir=DATA
Hardware   Two CPU cores and 2 GB of memory. DATA as in wiki_sample.py.
Hours      0.08, as a run of wiki_sample.py. Computed.
Expected   Not yet run. Its rivals are wiki_sample.py's p = 0.75 and p = 1.
"""

import pathlib
import runpy

from prope.config import shrink_for_laptop

families = runpy.run_path(str(pathlib.Path(__file__).with_name("families.py")))
wiki_sample = runpy.run_path(str(pathlib.Path(__file__).with_name("wiki_sample.py")))


def get_config(size: str = "full"):
    config = wiki_sample["get_config"]()
    families["smollm3"](config)
    config.model.max_wavelength = 5e4
    return shrink_for_laptop(config, size)
