"""vLLM's OpenAI server as it is, in front of an engine that answers at once: `vllm_null_server.py --model MODEL [...]`.

Everything in this process is vLLM's, from the command line on: uvicorn with uvloop, routes, serving classes, AsyncLLM,
output processor, detokenizer, and the sockets to the engine's process. That one runs vllm_null_core.py. No weights are
read. Not `vllm serve` itself, which looks for a package named vllm (the CPU wheel has another name): what it calls.
"""

import vllm_null_core
from vllm.v1.engine import core

if __name__ == "__main__":
    # the engine's process imports this file again, and calls what is named here
    core.EngineCoreProc.run_engine_core = staticmethod(vllm_null_core.run)
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
