"""Training data for tests: learnable texts of a made-up target, and a tiny target's folder with prompts for recipes."""

import torch

from paceline.adapt.data.regenerate import RegenerateConfig
from paceline.adapt.families.target_handle import TargetHandle
from paceline.serving.sampling.request import RequestTrace

VOCAB, EMBED, FEATURES = 24, 16, 24
TARGET = TargetHandle(
    version="target-1", vocab_size=VOCAB, feature_size=FEATURES, device=torch.device("cpu"),
    embed_weight=torch.randn(VOCAB, EMBED, generator=torch.Generator().manual_seed(0)),
)  # fmt: skip
TOKEN_TO_FEATURE = torch.randn(VOCAB, FEATURES, generator=torch.Generator().manual_seed(1))


def learnable_trace(name, bucket="math", num_outputs=40, target=TARGET.version):
    """A text whose tokens follow from one another, with features that tell the next one."""
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    tokens = [int(torch.randint(0, VOCAB, (1,), generator=g))]
    for _ in range(3 + num_outputs):
        tokens.append((tokens[-1] * 5 + 3) % VOCAB)
    ids = torch.tensor(tokens[4:], dtype=torch.int32)[:, None]
    return RequestTrace(
        request_id=name, bucket=bucket, temperature=0.0, prompt_len=4, token_ids=tokens,
        features=TOKEN_TO_FEATURE[tokens[1:]], topk_ids=ids, topk_logprobs=torch.full(ids.shape, -0.01),
        target_version=target,
    )  # fmt: skip


TEXT = RegenerateConfig(num_tokens=300, max_new_tokens=24, batch_requests=6, max_prompt_tokens=20, topk=4)
