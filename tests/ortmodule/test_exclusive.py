"""A child that is forked while another thread exports holds none of the locks."""

from test_first_calls import pytestmark, run  # noqa: F401


def test_a_fork_while_another_thread_exports():
    """The child has torch as it was, and none of the locks is held."""
    run("""
    import os
    child = []
    def fork():
        pid = os.fork()
        if pid == 0:
            child.append(pid)  # it forks no other one
            try:
                left = [name for owner, name, value, own in before.values()
                        if (name in vars(owner)) != own or vars(owner).get(name) is not value]
                assert not left, left
                errors.clear()
                train(Net(2))
                assert not errors and not wrong, errors
                os._exit(0)
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
        child.append(pid)

    from onnxtrain._export import exclusive
    from onnxtrain.ortmodule._runner import GraphRunner
    plain = GraphRunner._program
    def program(self, *args):
        if not child:
            helper = threading.Thread(target=fork)
            helper.start()
            helper.join()
        return plain(self, *args)
    GraphRunner._program = program
    train(Net(2))
    deadline = time.time() + 300
    while (ended := os.waitpid(child[0], os.WNOHANG)) == (0, 0):
        if time.time() > deadline:
            os.kill(child[0], 9)
            raise AssertionError("the child hangs")
        time.sleep(0.1)
    assert ended[1] == 0, ended
    check()
    """)
