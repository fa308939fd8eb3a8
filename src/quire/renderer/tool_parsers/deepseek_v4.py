"""DeepSeek V4: as V3.2, in a block of another name, `<｜DSML｜tool_calls>`."""

from quire.renderer.tool_parsers.invoke import calls_in_tags

FORMAT = calls_in_tags("deepseek_v4", "｜DSML｜tool_calls", "｜DSML｜", on_own_lines=False)
