"""One thread per test process: several run side by side, and small products are slower on many threads."""

import torch

torch.set_num_threads(1)
