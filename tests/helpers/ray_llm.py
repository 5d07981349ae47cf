"""Ray Serve LLM, alone: `python ray_llm.py CONFIG.yaml` runs the application of a Serve configuration until its input ends.

Runs with the Python of an environment that has vLLM; a cluster would be given the file by `serve deploy`.
"""

import sys
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve.llm import build_openai_app

config = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20)
serve.start(proxy_location="HeadOnly", http_options=config["http_options"])
(application,) = config["applications"]
serve.run(build_openai_app(application["args"]), name=application["name"], route_prefix=application["route_prefix"])
print("it serves", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
