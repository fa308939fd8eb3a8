"""DeepSeek V4.1: as V4, with a space behind each mark, in a block `<｜DSML｜ calls>`."""

from quire.renderer.tool_parsers.invoke import calls_in_tags

FORMAT = calls_in_tags("deepseek_v41", "｜DSML｜ calls", "｜DSML｜ ", on_own_lines=False)
