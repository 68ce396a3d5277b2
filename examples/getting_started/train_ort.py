"""The sample through ORTModule: the wrap is all that differs from train.py. `--ort trainer` and `--ort legacy` train it
by ORTTrainer of ONNX Runtime Training, in its form from 1.5 on and the one before.
"""

import trainers
from loop import parser, train

from onnxtrain.ortmodule import ORTModule

if __name__ == "__main__":
    options = parser()
    options.add_argument("--ort", choices=["module", *trainers.LOOPS], default="module")
    args = options.parse_args()
    if args.ort == "module":
        train(lambda model: ORTModule(model), "onnxtrain", args)
    else:
        train(lambda model: model, f"onnxtrain, {args.ort}", args, trainers.LOOPS[args.ort])
