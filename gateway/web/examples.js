// Prompts that a small model trained on Python code and its documentation can go on with.

export const EXAMPLES = [
  {
    name: "A class",
    prompt: `class Rectangle:
    def __init__(self, width, height):
        self._width = width
        self._height = height

    @property
    def width(self):
        """Return the width."""
        return self._width

    @property
    def height(self):
`,
  },
  {
    name: "Options of a command",
    prompt: `import argparse


def main():
    parser = argparse.ArgumentParser(description="Counts words.")
    parser.add_argument("--input", type=str, default=None, help="The file to read.")
    parser.add_argument("--output", type=str, default=None, help="The file to write.")
    parser.add_argument("--encoding", type=str, default=`,
  },
  {
    name: "Tests",
    prompt: `class TestStack(unittest.TestCase):
    def test_push(self):
        stack = Stack()
        stack.push(1)
        self.assertEqual(len(stack), 1)

    def test_pop(self):
        stack = Stack()
`,
  },
  {
    name: "A module's page",
    prompt: `.. function:: open(file, mode='r')

   Open *file* and return a file object.  If the file cannot be opened, an
   :exc:\`OSError\` is raised.

.. function:: close(file)

`,
  },
  {
    name: "Prose",
    prompt: "This tutorial explains how to use the module.  The first section",
  },
];
