"""The repository pytorch/examples: each script's definitions, trained as the script does."""

import sys
from collections import namedtuple
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from scripts import Run, definitions, images, script, tokens
from torch import nn, optim

EXAMPLES = "pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8"


def classify(run: Run, model, optimizer, batches):
    """The loop of mnist and mnist_rnn."""
    for data, target in batches:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        run.step(loss)


@script(EXAMPLES, requires=("torchvision",))
def mnist(run: Run):
    model = run.wrap(definitions(run.folder / "mnist" / "main.py").Net())
    classify(run, model, optim.Adadelta(model.parameters(), lr=1.0), (images(n, 1, 28, 10) for n in run.sizes(64, 32)))


@script(EXAMPLES, requires=("torchvision",))
def mnist_rnn(run: Run):
    model = run.wrap(definitions(run.folder / "mnist_rnn" / "main.py").Net())
    classify(run, model, optim.Adadelta(model.parameters(), lr=0.1), (images(n, 1, 28, 10) for n in run.sizes(64, 32)))


@script(EXAMPLES, requires=("torchvision",))
def vae(run: Run):
    main = definitions(run.folder / "vae" / "main.py")
    model = run.wrap(main.VAE())
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for n in run.sizes(128, 96):
        data = torch.rand(n, 1, 28, 28)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = main.loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        optimizer.step()
        run.step(loss)


@script(EXAMPLES, line="netG, netD = ORTModule(netG), ORTModule(netD)", requires=("torchvision",))
def dcgan(run: Run):
    """Narrower than the default, --ngf 64 --ndf 64."""
    main = definitions(run.folder / "dcgan" / "main.py", nc=3, nz=100, ngf=8, ndf=8)
    netG, netD = main.Generator(1), main.Discriminator(1)
    netG.apply(main.weights_init)
    netD.apply(main.weights_init)
    netG, netD = run.wrap(netG), run.wrap(netD)
    criterion = nn.BCELoss()
    optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for n in run.sizes(8, 5):
        netD.zero_grad()
        real, label = torch.randn(n, 3, 64, 64), torch.full((n,), 1.0)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(torch.randn(n, 100, 1, 1))
        label.fill_(0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        run.step(errD_real + errD_fake + errG)


def language_model(run: Run, kind):
    """word_language_model's train(): batches along a text, the last one shorter."""
    sys.path.insert(0, str(run.folder / "word_language_model"))
    import model as models

    main = definitions(run.folder / "word_language_model" / "main.py", args=SimpleNamespace(bptt=35))
    words, batch = 200, 20
    if kind == "Transformer":
        model = models.TransformerModel(words, 32, 2, 32, 2, dropout=0.0)
    else:
        model = models.RNNModel(kind, words, 32, 32, 2, dropout=0.0, tie_weights=True)
    model = run.wrap(model)
    criterion, text = nn.NLLLoss(), tokens(words, 35 * (run.steps - 1) + 20, batch)
    hidden = None if kind == "Transformer" else model.init_hidden(batch)
    for i in range(run.steps):
        data, targets = main.get_batch(text, 35 * i)
        model.zero_grad()
        if kind == "Transformer":
            output = model(data).view(-1, words)
        else:
            hidden = main.repackage_hidden(hidden)
            output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-1.0)
        run.step(loss)


@script(EXAMPLES)
def word_language_model_lstm(run: Run):
    language_model(run, "LSTM")


@script(EXAMPLES)
def word_language_model_gru(run: Run):
    language_model(run, "GRU")


@script(EXAMPLES)
def word_language_model_transformer(run: Run):
    language_model(run, "Transformer")


@script(EXAMPLES, line="fc = ORTModule(fc)", replaced="nothing")
def regression(run: Run):
    main = definitions(run.folder / "regression" / "main.py", POLY_DEGREE=4, W_target=torch.randn(4, 1) * 5,
                       b_target=torch.randn(1) * 5)
    fc = run.wrap(nn.Linear(4, 1))
    for _ in range(run.steps):
        batch_x, batch_y = main.get_batch()
        fc.zero_grad()
        output = F.smooth_l1_loss(fc(batch_x), batch_y)
        output.backward()
        for param in fc.parameters():
            param.data.add_(-0.1 * param.grad)
        run.step(output)


@script(EXAMPLES, requires=("torchvision",))
def siamese_network(run: Run):
    """In float64, since Adadelta with a ResNet of random weights amplifies roundings."""
    model = run.wrap(definitions(run.folder / "siamese_network" / "main.py").SiameseNetwork().double())
    optimizer, criterion = optim.Adadelta(model.parameters(), lr=1.0), nn.BCELoss()
    for n in run.sizes(16, 9):
        first, second = torch.rand(2, n, 1, 28, 28).double()
        targets = torch.randint(0, 2, (n,)).double()
        optimizer.zero_grad()
        outputs = model(first, second).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        run.step(loss)


@script(EXAMPLES, line="seq = ORTModule(seq)", requires=("matplotlib",))
def time_sequence_prediction(run: Run):
    """LBFGS, then a prediction of the future; sines of 60 samples instead of 1000."""
    seq = definitions(run.folder / "time_sequence_prediction" / "train.py").Sequence()
    seq.double()
    seq = run.wrap(seq)
    data = torch.sin((torch.arange(60) + torch.randint(-80, 80, (12, 1))) / 20).double()
    input, target = data[3:, :-1], data[3:, 1:]
    criterion, optimizer = nn.MSELoss(), optim.LBFGS(seq.parameters(), lr=0.8, max_iter=5)
    for _ in range(run.steps):
        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(input), target)
            loss.backward()
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            loss = criterion(seq(data[:3, :-1], future=20)[:, :-20], data[:3, 1:])
        run.step(loss)


@script(EXAMPLES)
def super_resolution(run: Run):
    sys.path.insert(0, str(run.folder / "super_resolution"))
    from model import Net

    model, criterion = run.wrap(Net(upscale_factor=3)), nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    for n in run.sizes(8, 5):
        optimizer.zero_grad()
        loss = criterion(model(torch.rand(n, 1, 24, 24)), torch.rand(n, 1, 72, 72))
        loss.backward()
        optimizer.step()
        run.step(loss)


@script(EXAMPLES, line="transformer, vgg = ORTModule(transformer), ORTModule(vgg)", replaced="data, VGG's weights",
        requires=("torchvision",))
def fast_neural_style(run: Run):
    import torchvision

    torchvision.models.vgg16 = lambda weights: torchvision.models.vgg.vgg16()
    sys.path.insert(0, str(run.folder / "fast_neural_style" / "neural_style"))
    import utils
    from transformer_net import TransformerNet
    from vgg import Vgg16

    transformer, vgg = run.wrap(TransformerNet()), run.wrap(Vgg16(requires_grad=False))
    optimizer, mse_loss = optim.Adam(transformer.parameters(), 1e-3), nn.MSELoss()
    gram_style = [utils.gram_matrix(y) for y in vgg((torch.rand(1, 3, 32, 32) * 255).repeat(2, 1, 1, 1))]
    for n in run.sizes(2, 1):
        x = torch.rand(n, 3, 32, 32) * 255
        optimizer.zero_grad()
        y = utils.normalize_batch(transformer(x))
        x = utils.normalize_batch(x)
        features_y, features_x = vgg(y), vgg(x)
        content_loss = 1e5 * mse_loss(features_y.relu2_2, features_x.relu2_2)
        style_loss = 0.0
        for ft_y, gm_s in zip(features_y, gram_style):
            style_loss += mse_loss(utils.gram_matrix(ft_y), gm_s[:n, :, :])
        total_loss = content_loss + style_loss * 1e10
        total_loss.backward()
        optimizer.step()
        run.step(total_loss)


def graph(sparse):
    """Features, adjacency, classes and a mask as load_cora gives them, of 60 nodes."""
    features = torch.rand(60, 30)
    adjacency = (torch.rand(60, 60) < 0.1).float()
    adjacency = torch.eye(60) + adjacency
    if sparse:
        degree = adjacency.sum(1).rsqrt()
        return features.to_sparse(), (degree[:, None] * adjacency * degree).to_sparse(), torch.randint(0, 7, (60,))
    return features, adjacency, torch.randint(0, 7, (60,))


def nodes(run: Run, model, optimizer, sparse):
    """train_iter of gcn and gat: a step, then train and validation accuracy in eval mode."""
    criterion, (features, adjacency, target) = nn.NLLLoss(), graph(sparse)
    mask = torch.randperm(60)[:30]
    for _ in range(run.steps):
        model.train()
        optimizer.zero_grad()
        output = model(features, adjacency)
        loss = criterion(output[mask], target[mask])
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(features, adjacency)
        run.step(loss)


@script(EXAMPLES, requires=("requests",))
def gcn(run: Run):
    """Features and adjacency are sparse tensors, as in the script."""
    model = run.wrap(definitions(run.folder / "gcn" / "main.py").GCN(30, 16, 7, dropout_p=0.0))
    nodes(run, model, optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4), sparse=True)


@script(EXAMPLES, requires=("requests",))
def gat(run: Run):
    model = run.wrap(definitions(run.folder / "gat" / "main.py").GAT(30, 64, 8, 7, dropout=0.0))
    nodes(run, model, optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4), sparse=False)


def gradients(model):
    """Their norm, for a script that does not tell its loss."""
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm()


def plays(run: Run, name, attribute, lr, **given):
    """reinforcement_learning/NAME: one call of forward for each move, all of them part of an episode's loss."""
    import gymnasium

    main = definitions(run.folder / "reinforcement_learning" / name, args=SimpleNamespace(gamma=0.99), eps=1e-7, **given)
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=543)
    model = run.wrap(main.Policy())
    setattr(main, attribute, model)
    main.optimizer = optim.Adam(model.parameters(), lr=lr)
    for _ in range(run.steps):
        state, _ = env.reset()
        for _ in range(100):  # or until the pole falls
            state, reward, terminated, truncated, _ = env.step(main.select_action(state))
            model.rewards.append(reward)
            if terminated or truncated:
                break
        main.finish_episode()
        run.step(gradients(model))


@script(EXAMPLES, line="policy = ORTModule(policy)", replaced="nothing", requires=("gymnasium",))
def reinforce(run: Run):
    plays(run, "reinforce.py", "policy", 1e-2)


@script(EXAMPLES, replaced="nothing", requires=("gymnasium",))
def actor_critic(run: Run):
    plays(run, "actor_critic.py", "model", 3e-2, SavedAction=namedtuple("SavedAction", ["log_prob", "value"]))


@script(EXAMPLES)
def language_translation(run: Run):
    """A float tgt_mask and bool padding masks, as create_mask makes them; lengths change from batch to batch."""
    sys.path.insert(0, str(run.folder / "language_translation" / "src"))
    from model import Translator

    model = run.wrap(Translator(2, 2, 32, 4, 100, 120, 64, 0.0))
    optimizer = optim.Adam(model.parameters(), lr=1e-4)
    criterion = nn.CrossEntropyLoss(ignore_index=1)
    for i, n in enumerate(run.sizes(8, 5)):
        src, tgt = tokens(100, 9 + i % 4, n), tokens(120, 8 + i % 3, n)
        src[-2:, 0], tgt[-3:, 0] = 1, 1
        tgt_input = tgt[:-1, :]
        src_mask = torch.zeros((len(src), len(src))).type(torch.bool)
        tgt_mask = nn.Transformer.generate_square_subsequent_mask(len(tgt_input))
        src_padding, tgt_padding = (src == 1).transpose(0, 1), (tgt_input == 1).transpose(0, 1)
        logits = model(src, tgt_input, src_mask, tgt_mask, src_padding, tgt_padding, src_padding)
        optimizer.zero_grad()
        loss = criterion(logits.reshape(-1, 120), tgt[1:, :].reshape(-1))
        loss.backward()
        optimizer.step()
        run.step(loss)


@script(EXAMPLES)
def mingpt_ddp(run: Run):
    """distributed/minGPT-ddp in one process: nn.MultiheadAttention with a float mask of zeros and ones."""
    model = definitions(run.folder / "distributed" / "minGPT-ddp" / "mingpt" / "model.py")
    config = model.GPTConfig(model_type=None, n_layer=2, n_head=2, n_embd=32, vocab_size=65, block_size=32)
    net = model.GPT(config)
    optimizer = model.create_optimizer(net, model.OptimizerConfig())
    net = run.wrap(net)
    for n in run.sizes(8, 5):
        _, loss = net(tokens(65, n, 32), tokens(65, n, 32))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        run.step(loss)


@script(EXAMPLES)
def snli(run: Run):
    """legacy/snli: a bidirectional LSTM over batches of sentences of changing lengths."""
    sys.path.insert(0, str(run.folder / "legacy" / "snli"))
    from model import SNLIClassifier

    config = SimpleNamespace(n_embed=100, d_embed=24, d_proj=20, d_hidden=16, n_layers=1, n_cells=2, birnn=True,
                             projection=True, fix_emb=True, dp_ratio=0.0, d_out=3)
    model = run.wrap(SNLIClassifier(config))
    optimizer, criterion = optim.Adam(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    for i, n in enumerate(run.sizes(16, 9)):
        batch = SimpleNamespace(premise=tokens(100, 9 + i % 3, n), hypothesis=tokens(100, 6 + i % 4, n))
        optimizer.zero_grad()
        loss = criterion(model(batch), torch.randint(0, 3, (n,)))
        loss.backward()
        optimizer.step()
        run.step(loss)
