"""regression: Linear(20, 1), the problem of OLCF's PyTorch example, but with learnable targets, and a loss that has a gradient.

python train.py --workload regression
"""

import torch.nn.functional as F
from torch import nn

from ddp_core import Workload
from ddp_core.data import HELD_OUT, Rows, split
from ddp_core.order import uniform
from ddp_core.workload import initial_parameters

FEATURES = 20
TRAINING_ROWS = 2048


class Regression(Workload):
    # The batch size is per rank, as in the example: the global batch grows with the number of ranks.
    defaults = dict(epochs=20, per_rank_batch_size=32, optimizer="sgd", lr=1e-3, momentum=0.0)

    def data(self, config):
        """Rows of 20 features in [0, 1), drawn from integers. Targets are a linear function of the features, plus noise."""
        count = TRAINING_ROWS + TRAINING_ROWS // (HELD_OUT - 1)
        inputs = uniform(count * FEATURES, 2, 0).view(count, FEATURES)
        teacher = uniform(FEATURES, 2, 1) - 0.5
        noise = uniform(count, 2, 2) - 0.5
        # Summed feature by feature: a matrix product adds in another order on another machine.
        targets = sum(inputs[:, i] * teacher[i] for i in range(FEATURES)) + 0.1 * noise
        return split(Rows(inputs, targets.view(count, 1), fingerprint="regression-1"))

    def model(self, config):
        return initial_parameters(nn.Linear(FEATURES, 1), config.seed)

    def loss(self, outputs, batch):
        # Squared error. The example has a cross-entropy over one output, which is always 0.
        return F.mse_loss(outputs, batch[1], reduction="sum")

    def metrics(self, outputs, batch):
        return {"absolute_error": F.l1_loss(outputs, batch[1], reduction="sum")}
