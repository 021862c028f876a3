import torch
import torch.nn.functional as F

from tapfl.model.encoder import ImageNormalizer
from tests.conftest import TASKS, make_batch


def test_the_papers_normalisation():
    image = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    mean = torch.tensor([0.5071, 0.4865, 0.4409]).view(3, 1, 1)
    std = torch.tensor([0.2673, 0.2564, 0.2762]).view(3, 1, 1)
    torch.testing.assert_close(ImageNormalizer()(image), (image / 255 - mean) / std)


def test_images_are_scaled_bilinearly_to_the_encoders_size(network):
    image = network.normalize(make_batch(TASKS["pets"]).image)
    encoder = network.foundation.encoders["image"]
    small = F.interpolate(image, size=(32, 32), mode="bilinear", align_corners=False)
    assert torch.equal(encoder(image), encoder(small))
