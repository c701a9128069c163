"""
plumbing/runs.py: what is not as it was. Used by tools/draft.py.
"""
import json


def settings_diff(args, inputs, run):
    """What is not as it was at the start before -> [text of a flag or an input]. inputs: see
    identities. run: {"args": .., "inputs": ..} of that start."""
    # How far, how fast, where, and who is told: two parts of one run may differ in these.
    # Inputs are compared by content: files may move. The last three are no flags.
    ignored = ("steps epochs resume check out save_every eval_every show_every show max_num_seqs "
               "frame_cache_gb frame_cache_dir frame_cache_dir_gb gpu_memory_utilization patience "
               "dp_replicate track project judge_url judge_tokens judge_key_env "
               "ckpt data val missing_videos rollouts code hub inputs").split()
    new, old, was = json.loads(json.dumps(vars(args))), run.get("args", {}), run.get("inputs", {})
    flags = [f"{k} {old[k]} (now {new.get(k, 'gone: use the code of that run')})"
             for k in sorted(old) if k not in ignored and (k not in new or old[k] != new[k])]
    return [f"{k} changed since" + f" ({was[k][1]}, now {inputs[k][1]})" * bool(was[k][1])
            for k in sorted(was) if k in inputs and inputs[k][0] != was[k][0]] + flags
