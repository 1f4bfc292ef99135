"""The rules by family; importing this registers all of them."""

from tfnb.gradients.rules import activation as activation
from tfnb.gradients.rules import arrays as arrays
from tfnb.gradients.rules import attention as attention
from tfnb.gradients.rules import calls as calls
from tfnb.gradients.rules import control as control
from tfnb.gradients.rules import convolution as convolution
from tfnb.gradients.rules import index as index
from tfnb.gradients.rules import linalg as linalg
from tfnb.gradients.rules import loss as loss
from tfnb.gradients.rules import normalize as normalize
from tfnb.gradients.rules import pointwise as pointwise
from tfnb.gradients.rules import random as random
from tfnb.gradients.rules import recurrent as recurrent
from tfnb.gradients.rules import reduce as reduce
from tfnb.gradients.rules import shape as shape
