"""Column, then row: tensor and sequence parallelism for transformers in plain PyTorch.

Split it any way; only the memory and the time change.
"""

from colrow import checkpoint as checkpoint
from colrow.dropout import Dropout as Dropout
from colrow.embedding import VocabEmbedding as VocabEmbedding
from colrow.errors import CheckpointError as CheckpointError
from colrow.errors import ColrowError as ColrowError
from colrow.errors import DataError as DataError
from colrow.errors import LayoutError as LayoutError
from colrow.errors import PlanError as PlanError
from colrow.errors import RankError as RankError
from colrow.errors import ShapeError as ShapeError
from colrow.head import VocabHead as VocabHead
from colrow.layout import I as I
from colrow.layout import P as P
from colrow.layout import R as R
from colrow.layout import S as S
from colrow.linear import ColumnLinear as ColumnLinear
from colrow.linear import RowLinear as RowLinear
from colrow.loss import vocab_cross_entropy as vocab_cross_entropy
from colrow.loss import vocab_log_probs as vocab_log_probs
from colrow.moves import move as move
from colrow.parallelize import parallelize as parallelize
from colrow.params import local as local
from colrow.plan import FEATURES as FEATURES
from colrow.plan import GROUPS as GROUPS
from colrow.plan import HEADS as HEADS
from colrow.plan import KV_HEADS as KV_HEADS
from colrow.plan import Attention as Attention
from colrow.plan import Block as Block
from colrow.plan import Column as Column
from colrow.plan import Drop as Drop
from colrow.plan import Head as Head
from colrow.plan import LastNorm as LastNorm
from colrow.plan import Mlp as Mlp
from colrow.plan import Moe as Moe
from colrow.plan import Norm as Norm
from colrow.plan import Plan as Plan
from colrow.plan import Replicated as Replicated
from colrow.plan import Router as Router
from colrow.plan import Row as Row
from colrow.plan import Sliced as Sliced
from colrow.plan import Vocab as Vocab
from colrow.pretrained import load_pretrained as load_pretrained
from colrow.pretrained import save_pretrained as save_pretrained
from colrow.resolve import resolve as resolve
from colrow.state import clip_grad_norm_ as clip_grad_norm_
from colrow.state import full_grads as full_grads
from colrow.state import full_state_dict as full_state_dict
from colrow.state import replica_drift as replica_drift
from colrow.state import seed as seed
from colrow.state import sync_replicas as sync_replicas
from colrow.static import check as check
from colrow.user_model import verify as verify
