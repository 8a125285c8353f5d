"""From a program and a plan to a step: passes, the interpreter that says what programs mean, generated code, and the JIT."""
