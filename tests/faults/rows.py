"""The fault campaign, row by row: what goes wrong, and the tests that show what then happens.

Fifty rows: 1 to 14 processes and storage, 15 to 23 workers and hosts, 24 to 34 numbers and memory,
35 to 41 data and configuration, 42 to 50 hostile text, servers and paths.  A row is shown by tests
or absent for a reason; ``test_rows.py`` holds the tests to exist.  docs/reliability.md is written
from these rows.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One fault."""

    fault: str
    outcome: str
    tests: tuple[str, ...] = ()
    """``path/below/tests.py::name``."""
    absent: str = ""
    """Why nothing shows it: what does not exist, and the issue that brings it."""


NO_SERVER = "there is no server; no issue that is filed (up to 17) brings one"

ROWS: dict[int, Row] = {
    1: Row(
        "kill -9 at random moments, then --resume",
        "the bytes of a run that nothing happened to",
        (
            "faults/test_kill.py::test_killed_and_resumed_runs_leave_the_files_of_one_never_killed",
            "faults/test_sft.py::"
            "test_killed_in_training_and_while_a_checkpoint_is_written_it_leaves_the_same_files",
            "faults/test_preference.py::test_killed_and_resumed_it_leaves_the_same_files",
            "run/test_lag.py::"
            "test_killed_between_any_two_steps_and_resumed_it_leaves_the_same_bytes",
        ),
    ),
    2: Row(
        "kill -9 at every boundary of writing a checkpoint",
        "the checkpoint before is used; what was torn goes, with a line",
        (
            "faults/test_boundaries.py::test_dying_at_any_write_boundary_loses_nothing",
            "faults/test_ranks.py::test_a_rank_killed_while_all_write",
            "faults/test_damage.py::"
            "test_leftovers_go_with_a_line_and_other_names_are_ignored_with_one",
        ),
    ),
    3: Row(
        "SIGTERM, SIGHUP, SIGXCPU, SIGUSR1 in a step, in grading, in an evaluation, in a save",
        "a checkpoint where the state is whole and an exit code; after SIGUSR1 the run goes on",
        (
            "faults/test_endings.py::test_a_closed_terminal_and_a_limit_on_time_stop_like_sigterm",
            "faults/test_endings.py::test_sigusr1_leaves_a_checkpoint_and_the_run_goes_on",
            "faults/test_signals.py::test_a_signal_ends_the_run_with_a_checkpoint_and_its_code",
            "faults/test_signals.py::test_a_policy_half_updated_is_never_saved",
            "faults/test_sft.py::test_stopped_in_an_evaluation_it_goes_on_there",
            "faults/test_graders.py::test_a_run_whose_reward_hangs_can_be_stopped_and_goes_on",
            "rewards/test_grading.py::"
            "test_a_signal_ends_a_call_in_the_process_of_the_run_and_nothing_between_two",
        ),
    ),
    4: Row(
        "Ctrl-C twice",
        "the first ends where it is safe, the second at once; no process is left",
        (
            "faults/test_signals.py::test_a_second_ctrl_c_ends_at_once",
            "faults/test_sft.py::test_a_second_ctrl_c_ends_at_once_and_writes_nothing_more",
            "launch/test_local.py::test_a_second_ctrl_c_ends_who_does_not_listen",
            "faults/test_graders.py::test_a_run_leaves_no_process_however_it_ends",
        ),
    ),
    5: Row(
        "a full disk while saving, a quota, a small file system",
        "the bytes needed and free are said, the write is tried again until there is room, a "
        "signal comes or checkpoint.wait_for_space_s ends: then an error; older checkpoints stay",
        (
            "faults/test_disk.py::test_a_save_goes_through_once_there_is_space",
            "faults/test_disk.py::test_a_signal_ends_the_waiting_for_space_at_once",
            "store/test_writing.py::test_it_is_tried_again_and_said_now_and_then",
            "store/test_writing.py::test_it_ends_after_the_time_and_what_follows_at_once",
            "store/test_writing.py::test_ranks_wait_and_end_together",
            "faults/test_disk.py::test_too_little_space_is_said_before_anything_is_written",
            "faults/test_disk.py::test_a_disk_that_has_filled_up_stops_the_run_before_the_write",
            "faults/test_disk.py::test_a_file_size_quota_stops_the_run_with_bytes",
            "faults/test_disk.py::"
            "test_a_small_file_system_stops_the_run_and_it_goes_on_with_more_space",
        ),
    ),
    6: Row(
        "an output directory that cannot be written, is moved, or vanishes",
        "refused at the start; a moved one gets its last checkpoint where it is",
        (
            "faults/test_endings.py::"
            "test_a_directory_that_is_moved_gets_its_last_checkpoint_where_it_is",
            "faults/test_endings.py::"
            "test_a_directory_that_is_removed_is_made_again_and_can_be_resumed",
            "faults/test_disk.py::test_a_directory_that_cannot_be_written_is_refused_at_the_start",
            "faults/test_disk.py::test_a_directory_that_vanishes_stops_the_run",
        ),
    ),
    7: Row(
        "one bit flipped in each file of a checkpoint",
        "the file is named, the checkpoint before is used",
        (
            "faults/test_damage.py::test_a_damaged_checkpoint_is_named_and_the_one_before_it_used",
            "store/test_ranks.py::test_every_chunk_is_looked_at",
            "store/test_extras.py::test_a_damaged_file_of_an_extra_rules_the_checkpoint_out",
            "faults/test_mutations.py::test_checkpoint",
        ),
    ),
    8: Row(
        "a file cut, deleted, emptied, of another step; EIO and EACCES on reading it",
        "each named, the checkpoint before is used",
        (
            "faults/test_damage.py::test_a_damaged_checkpoint_is_named_and_the_one_before_it_used",
            "faults/test_damage.py::"
            "test_none_usable_is_an_error_that_lists_them_and_changes_nothing",
            "store/test_resume.py::test_a_manifest_of_another_run_is_not_believed",
            "store/test_resume.py::test_any_answer_of_the_disk",
            "store/test_resume.py::test_one_that_cannot_be_read_is_passed_over",
        ),
    ),
    9: Row(
        "a checkpoint of a newer format, or of an older one",
        "refused with both numbers",
        (
            "faults/test_damage.py::test_a_damaged_checkpoint_is_named_and_the_one_before_it_used",
            "store/test_extras.py::test_a_checkpoint_of_another_format_is_refused",
        ),
    ),
    10: Row(
        "resume with another configuration, other data, model or number of processes",
        "a table of both values, refused; what may change may",
        (
            "faults/test_resume.py::"
            "test_another_configuration_is_refused_with_all_keys_and_both_values",
            "faults/test_resume.py::test_other_training_prompts_are_refused",
            "faults/test_resume.py::test_what_may_change_may_and_more_steps_are_those_of_a_longer_run",
            "faults/test_sft.py::test_another_configuration_and_other_data_are_refused",
            "faults/test_inputs.py::test_an_edited_input_is_refused_with_a_table",
            "faults/test_inputs.py::"
            "test_a_change_that_is_allowed_is_journalled_and_in_force_at_once",
            "store/test_manifest_bits.py::test_the_arithmetic_of_another_instruction_set_is_refused",
            "training/test_reference.py::test_a_resumed_run_whose_reference_has_changed_is_refused",
            "run/test_ranks.py::test_the_bytes_of_a_run_do_not_depend_on_its_processes",
        ),
    ),
    11: Row(
        "step_abc, step_10.tmp, links among the checkpoints",
        "ignored with one line; links are not followed",
        (
            "faults/test_damage.py::"
            "test_leftovers_go_with_a_line_and_other_names_are_ignored_with_one",
            "store/test_checkpoint_rules.py::test_only_folders_with_a_step_are_checkpoints",
            "store/test_directory.py::test_links_in_the_place_of_a_run_s_files_are_refused",
        ),
    ),
    12: Row(
        "two processes on one directory",
        "the second is refused with process and host; a dead one's lock is free",
        (
            "faults/test_signals.py::test_two_processes_on_one_directory",
            "faults/test_sft.py::test_a_second_process_is_refused",
            "store/test_directory.py::test_a_directory_is_held_by_one_and_free_afterwards",
            "store/test_directory.py::test_a_forked_child_does_not_hold_the_directory",
        ),
    ),
    13: Row(
        "the clock jumps back; a slow disk",
        "events and steps keep their order; a save that took long, and much of the run's time, is "
        "told of with its seconds, share and MB/s; a large one says its seconds",
        (
            "store/test_keeper.py::"
            "test_a_save_that_takes_long_and_much_of_the_time_is_told_of_with_its_figures",
            "store/test_keeper.py::test_a_run_on_a_slow_disk_says_it_once",
            "observe/test_events.py::test_a_clock_that_runs_back_changes_no_order",
            "store/test_keeper.py::"
            "test_large_files_are_announced_with_their_size_and_then_the_seconds",
        ),
    ),
    14: Row(
        "one checkpoint is kept, and writing the next fails",
        "the old one stays until the new one is whole",
        (
            "faults/test_boundaries.py::test_dying_at_any_write_boundary_loses_nothing",
            "faults/test_disk.py::"
            "test_no_space_in_the_middle_of_a_write_leaves_the_last_checkpoint_and_no_rest",
        ),
    ),
    15: Row(
        "a rollout process is killed, idle or while it serves",
        "found at the next look (ours: a tenth of a second, the watch: one second), named with its "
        "phase; our launcher starts the rollouters again and the trainers go on, others start all "
        "again (torchrun's --max-restarts); its requests are drawn anew with the same seeds and "
        "graded once: the same bytes",
        (
            "faults/test_restarts.py::test_rollouters_die_and_the_trainers_go_on",
            "faults/test_restarts.py::"
            "test_rollouters_that_draw_freely_die_and_each_trajectory_counts_once",
            "faults/test_restarts.py::test_a_batch_that_only_its_line_names_is_drawn_again",
            "faults/test_environment_restarts.py::"
            "test_what_tools_have_said_is_recorded_once_however_rollouters_die",
            "launch/test_rollouter_restarts.py::"
            "test_all_rollouters_are_started_again_where_one_was_killed",
            "faults/test_restarts.py::test_our_launcher",
            "faults/test_restarts.py::test_torchrun",
            "launch/test_ranks.py::"
            "test_a_death_is_found_at_the_next_look_and_the_others_are_asked_to_end",
            "parallel/test_watch.py::test_a_process_that_is_gone",
            "run/test_rollouters.py::test_an_error_of_one_part_ends_the_other_and_the_run_goes_on",
            "faults/test_kill_parts.py::"
            "test_a_trainer_and_its_rollouter_die_and_come_back_together",
            "faults/test_rank_deaths.py::"
            "test_rank_1_dies_in_phases_and_hangs_and_one_process_ends_the_run",
            "faults/test_rank_deaths.py::test_ranks_that_share_an_engine_end_together",
            "rollout/test_shared.py::test_what_ends_one_rank_ends_all_and_names_the_one",
        ),
    ),
    16: Row(
        "a process dies again and again",
        "as many restarts as are allowed, then the first error and a code that is not 0",
        (
            "launch/test_local.py::test_it_is_resumed_as_often_as_is_allowed",
            "launch/test_local.py::test_what_would_happen_again_is_not_tried_again",
            "faults/test_restarts.py::"
            "test_rollouters_that_die_before_they_answer_end_the_run_at_the_third_time",
            "launch/test_rollouter_restarts.py::"
            "test_the_third_death_without_an_answer_ends_the_run",
        ),
    ),
    17: Row(
        "a process hangs (SIGSTOP, sleep)",
        "found by the watch, named with its phase, ended",
        (
            "launch/test_own_rank.py::test_what_never_ends_is_ended",
            "faults/test_restarts.py::test_a_rollouter_that_hangs_is_ended_and_comes_back",
            "faults/test_rank_deaths.py::"
            "test_rank_1_dies_in_phases_and_hangs_and_one_process_ends_the_run",
        ),
    ),
    18: Row(
        "one rank raises, or stands before another collective than the others",
        "all end, one reason is said, the rank is named",
        (
            "launch/test_own_rank.py::test_an_error_under_our_launcher",
            "launch/test_own_rank.py::test_an_error_under_another_launcher",
            "launch/test_own_rank.py::test_a_rank_dies_and_no_launcher_ends_the_other",
            "parallel/test_watch.py::test_ranks_that_have_come_apart",
            "faults/test_ranks.py::test_what_one_rank_alone_writes_ends_all_where_it_cannot",
        ),
    ),
    19: Row(
        "weights arrive stale, in part, or in another order; sampled with others than specified",
        "a checksum of all bytes, each in its place, ends all ranks before a token is drawn; "
        "every log-probability is compared with the training forward besides",
        (
            "models/test_handover.py::"
            "test_weights_that_arrive_otherwise_end_all_ranks_before_they_are_read",
            "faults/test_ranks.py::"
            "test_weights_that_arrive_permuted_end_the_run_before_anything_is_sampled_with_them",
            "run/test_rollouters.py::test_an_error_of_one_part_ends_the_other_and_the_run_goes_on",
            "run/test_lag.py::test_a_run_that_samples_with_the_newest_weights_is_found",
            "run/test_lag.py::test_what_is_compared_after_the_weights_moved_differs",
            "proof/test_check.py::"
            "test_an_exact_run_ends_before_it_learns_and_keeps_its_figures_and_weights",
        ),
    ),
    20: Row(
        "no Ray at the address, a lost actor, a cluster without a token",
        "named; ended or started again; warned of",
        (
            "launch/test_ray_launcher.py::test_an_address_where_nobody_listens_is_named",
            "launch/test_ray_launcher.py::test_the_death_of_an_actor_ends_all",
            "launch/test_ray_launcher.py::test_a_cluster_without_a_token_is_warned_of",
        ),
    ),
    21: Row(
        "a reward segfaults, fills memory, forks, hangs",
        "its completion fails and is counted, its process is replaced; the run goes on",
        (
            "rewards/test_pool.py::test_harm_fails_its_own_completion_alone",
            "rewards/test_pool.py::test_memory_is_limited_and_given_back",
            "rewards/test_pool.py::test_what_a_reward_forks_and_lets_return_ends_there",
            "rewards/test_pool.py::test_a_reward_that_makes_processes_without_end_is_ended",
            "rewards/test_pool.py::test_children_end_with_a_deadline",
            "rewards/test_grading.py::test_a_fork_in_the_process_of_the_run_is_no_second_run",
        ),
    ),
    22: Row(
        "every reward of a batch fails",
        "the run ends with the first error; nothing is learnt from zeros",
        (
            "rewards/test_grading.py::test_too_many_failures_stop_the_run_with_the_first_error",
            "faults/test_resume.py::test_a_run_that_failed_goes_on_once_its_reward_is_mended",
        ),
    ),
    23: Row(
        "two runs on one host",
        "each takes a free port of its own; the end of one is none of the other",
        ("launch/test_local.py::test_two_runs_on_one_host_do_not_meet",),
    ),
    24: Row(
        "NaN or infinity in a loss, a gradient, a master, a logit, a published weight",
        "the update is skipped on all ranks and the layer named, or the run ends; nothing is moved",
        (
            "faults/test_not_finite.py::"
            "test_the_update_is_skipped_with_its_layer_and_a_resumed_run_skips_it_again",
            "training/test_trainer.py::test_a_step_that_is_not_finite_changes_nothing",
            "training/test_trainer.py::test_a_gradient_that_is_not_finite_in_one_master_skips_the_step",
            "training/test_trainer.py::test_too_many_skipped_updates_in_a_row_stop_the_training",
            "training/test_trainer.py::test_a_master_that_is_not_finite_is_an_error",
            "rollout/test_exactness.py::"
            "test_nan_weights_are_an_error_and_leave_no_nan_in_the_pages",
            "training/test_ranks.py::test_what_one_rank_cannot_do_none_does",
        ),
    ),
    25: Row(
        "a reward of NaN, infinity, 1e30, a complex number, text",
        "a failure with the function and the completion; excluded and counted",
        (
            "rewards/test_grading.py::test_what_is_no_finite_number_is_excluded_and_counted",
            "rewards/test_grading.py::test_failures_are_counted_by_kind_with_the_first_message",
            "rewards/test_grading.py::test_a_sum_that_is_too_large_is_a_failure",
        ),
    ),
    26: Row(
        "all rewards of a group equal, also 0.1 in float32",
        "advantages of exactly 0, counted",
        (
            "algorithms/test_advantages.py::test_equal_rewards_give_exactly_zero",
            "algorithms/test_credit.py::test_equal_rewards_give_exactly_zero",
            "algorithms/test_credit.py::test_a_level_group_beside_others_stays_exactly_zero",
        ),
    ),
    27: Row(
        "every group level",
        "the update is left out and counted; said after n steps, and the run can stop",
        (
            "training/test_step.py::"
            "test_an_update_of_level_groups_is_left_out_whatever_momentum_there_is",
            "run/test_log.py::test_a_run_without_a_signal_changes_no_byte_counts_it_and_can_stop",
        ),
    ),
    28: Row(
        "a group of one, a batch of one, an empty completion",
        "defined, without NaN",
        (
            "algorithms/test_advantages.py::test_fewer_than_two_valid_rewards_are_excluded",
            "records/test_packing.py::test_excluded_and_empty_completions_are_left_out",
            "run/test_reward_model.py::test_an_empty_completion_has_a_score",
            "rollout/test_native.py::test_finish_reasons",
        ),
    ),
    29: Row(
        "blocks of zeros, outliers, subnormal numbers, infinity before a cast",
        "finite scales; infinity marks its block and is an error, not 448",
        (
            "kernels/spec/test_quantise.py::test_zero_block",
            "kernels/spec/test_quantise.py::test_values_up_to_448_scales_and_subnormals",
            "kernels/spec/test_quantise.py::test_a_block_that_is_not_finite_is_marked_whole",
            "proof/test_verify.py::test_outliers_and_large_biases_on_k",
        ),
    ),
    30: Row(
        "matrices whose sides are no multiples of 128",
        "short blocks, in linears, export and import",
        (
            "kernels/spec/test_any_size.py::test_each_block_has_the_scale_of_its_own_numbers",
            "kernels/spec/test_cases.py::test_rows",
            "models/test_saving.py::"
            "test_what_is_fused_with_a_part_that_is_not_whole_is_bf16_without_a_loss",
            "commands/test_export.py::test_fp8_exported_and_imported_has_the_same_bytes_and_is_exact",
        ),
    ),
    31: Row(
        "importance ratios that explode",
        "clipped, masked or rejected as configured, and counted",
        (
            "algorithms/test_corrections.py::test_no_ratio_is_too_large",
            "algorithms/test_corrections.py::test_a_log_ratio_counts_for_no_more_than_its_bound",
            "algorithms/test_losses.py::test_dual_clip_bounds_what_a_bad_token_can_do",
            "training/test_replay_buffer.py::test_the_stale_are_dropped",
            "proof/test_check.py::test_a_ratio_that_is_far_out_is_told_of_in_any_flow",
        ),
    ),
    32: Row(
        "out of memory in forward, backward, a held-out loss",
        "smaller micro-batches, journalled, made again by a resumed run",
        (
            "faults/test_out_of_memory.py::test_the_change_is_journalled_and_said_and_decides_bits",
            "faults/test_out_of_memory.py::"
            "test_a_killed_run_makes_the_change_again_without_running_out_of_memory",
            "faults/test_out_of_memory.py::test_a_run_that_cannot_go_on_keeps_what_it_has_learnt",
            "run/test_sft.py::"
            "test_a_held_out_loss_without_memory_is_measured_in_smaller_micro_batches",
        ),
    ),
    33: Row(
        "host memory of a data worker runs out",
        "",
        absent="there are no data workers: the trainer reads its rows before the first step. "
        "Graders have a limit of memory (row 21). No issue that is filed brings data workers",
    ),
    34: Row(
        "a back end that computes something else",
        "isobit doctor and isobit verify --bisect fail by the operation's name",
        (
            "proof/test_planted_faults.py::test_a_planted_fault_is_seen_and_named",
            "cli/test_doctor.py::test_a_wrong_gemm_fails_by_name_with_a_fix",
            "proof/test_doctor_mutants.py::test_wrong_quantisers",
            "proof/test_doctor_mutants.py::test_a_wrong_decoder_and_a_wrong_grid",
            "proof/test_doctor_mutants.py::test_a_starter_model_that_differs_in_one_bit",
        ),
    ),
    35: Row(
        "keys unknown, misspelt, of a wrong type, out of range, in conflict",
        "all of them at once, with path, what was expected, the nearest name; exit code 2",
        (
            "config/test_load.py::test_every_problem_is_listed_with_its_dotted_path",
            "config/test_suggestions.py::test_every_misspelt_key_is_answered_with_the_right_one",
            "config/test_bounds.py::test_every_number_has_both_bounds",
            "config/test_bounds.py::test_a_number_or_a_nesting_beyond_all_runs_is_refused_in_a_line",
            "config/test_rules.py::test_a_run_that_contradicts_itself_is_refused",
            "faults/test_mutations.py::test_recipe",
        ),
    ),
    36: Row(
        "rows without a column, empty or too long prompts, empty files, invalid UTF-8, long lines",
        "the row is named; too long: refused, dropped and counted, or cut",
        (
            "data/test_sources.py::test_a_faulty_line_is_named",
            "data/test_sources.py::test_an_empty_or_missing_file_is_an_error",
            "data/test_prompts.py::test_an_unusable_prompt_is_named",
            "data/test_prompts.py::test_long_prompts_are_dropped_and_counted",
            "data/test_prompts.py::"
            "test_a_text_of_megabytes_is_refused_dropped_or_cut_before_it_is_tokenised",
            "data/test_sources.py::test_csv_that_is_wrong",
            "faults/test_mutations.py::test_dataset",
            "data/test_sources.py::test_parquet_that_is_wrong",
            "run/test_rl_run.py::test_a_prompt_longer_than_the_context",
        ),
    ),
    37: Row(
        "messages of unknown roles, no chat template, a template that raises or never ends",
        "an error that names the row; templates run in a sandbox",
        (
            "data/test_tokenizer.py::test_a_hostile_template_is_refused_by_row",
            "data/test_examples.py::test_an_unusable_conversation_is_named",
            "data/test_examples.py::"
            "test_messages_without_a_template_and_no_token_at_all_are_refused",
            "data/test_prompts.py::test_an_unusable_prompt_is_named",
        ),
    ),
    38: Row(
        "a tokenizer larger than the embedding, damaged, without an end token",
        "refused by name",
        (
            "data/test_tokenizer.py::test_a_tokenizer_larger_than_the_embedding_is_refused",
            "data/test_tokenizer.py::test_a_damaged_tokenizer_is_named",
            "data/test_tokenizer.py::test_unusable_stop_tokens_are_errors",
            "models/test_mutations.py::test_tokenizer",
        ),
    ),
    39: Row(
        "model folders with pickles, code, files outside, headers that lie, wrong shapes, NaN",
        "refused with file and reason",
        (
            "models/test_folder.py::test_missing_folder_and_missing_files",
            "models/test_folder.py::test_what_the_decoder_does_not_compute_is_refused_by_name",
            "models/test_safetensors.py::test_files_that_are_damaged",
            "models/test_safetensors.py::test_entries_that_lie",
            "models/test_safetensors.py::test_a_header_of_more_than_the_limit_is_not_parsed",
            "models/test_checkpoint.py::test_config_and_tensors_that_disagree",
            "models/test_checkpoint.py::test_every_other_format_is_refused_by_name",
            "models/test_checkpoint.py::test_what_is_not_finite_as_a_master_is_refused_by_name",
            "models/test_checkpoint_files.py::test_index_and_files_that_disagree",
            "models/test_mutations.py::test_safetensors",
            "models/test_config.py::test_no_mutation_gives_a_traceback_or_another_shape_in_silence",
        ),
    ),
    40: Row(
        "a name of the hub that is missing, gated, not cached; offline",
        "one line with the remedy; offline reads the cache and asks nobody",
        (
            "models/test_hub.py::test_what_the_hub_does_not_give",
            "models/test_hub.py::test_offline_and_not_cached",
            "models/test_hub.py::test_a_cached_model_is_loaded_without_a_request",
            "data/test_hugging_face.py::test_what_the_hub_does_not_give",
            "data/test_hugging_face.py::test_an_interrupted_fetch_is_finished_and_offline_never_asks",
        ),
    ),
    41: Row(
        "rewards that miss an argument, return lists, None or booleans, print, sleep, exit, "
        "draw from a global generator, start threads",
        "each defined; what they change stays in their process",
        (
            "rewards/test_signatures.py::test_anything_else_is_refused_with_the_forms",
            "rewards/test_signatures.py::test_trls_none_and_lists_that_do_not_fit",
            "rewards/test_grading.py::test_every_kind_of_number_is_a_float",
            "rewards/test_grading.py::test_a_reward_that_exits_is_a_failure_not_an_end",
            "rewards/test_pool.py::test_printing_reaches_nobody_and_holds_nobody_up",
            "rewards/test_pool.py::test_what_a_reward_changes_in_its_process_stays_there",
            "rewards/test_pool.py::test_children_and_threads_end_with_the_pool",
            "rewards/test_pool.py::test_a_module_that_cannot_be_loaded_is_told_in_a_line",
            "rewards/test_grading.py::"
            "test_a_reward_that_answers_otherwise_when_asked_again_is_counted",
        ),
    ),
    42: Row(
        "answers with towers of powers, factorials, nesting, 100,000 digits, code, null bytes",
        "0 or right in time; nothing is executed",
        (
            "rewards/graders/test_math.py::test_what_is_out_of_bounds_scores_zero_and_is_counted",
            "rewards/graders/test_math.py::test_within_the_bounds_time_is_bounded",
            "rewards/graders/test_math.py::test_no_text_reaches_eval",
            "rewards/graders/test_reasoning_gym.py::"
            "test_no_hostile_answer_hangs_breaks_or_wins_a_task",
            "rewards/graders/test_reasoning_gym.py::test_a_scorer_that_executes_answers_is_refused",
        ),
    ),
    43: Row(
        "code: loops, fork bombs, memory, output, files, network, environment, forged verdicts",
        "a failed verdict; the host is as before",
        (
            "rewards/graders/test_code.py::test_what_is_hostile_scores_zero_and_is_counted",
            "rewards/graders/test_code.py::test_forks_sockets_and_writes_outside_do_not_happen",
            "rewards/graders/test_code.py::test_a_faked_pass_scores_zero",
            "rewards/test_sandbox.py::test_a_fork_bomb_stays_one_process",
            "rewards/test_sandbox.py::test_memory_is_bounded",
            "rewards/test_sandbox.py::test_output_is_bounded",
            "rewards/test_sandbox.py::test_no_sockets",
            "rewards/test_sandbox.py::test_nothing_outside_is_written",
            "rewards/test_sandbox.py::test_nothing_of_the_host_is_read",
            "rewards/sandboxed/test_judge.py::test_faked_passes_fail",
            "rewards/sandboxed/test_judge.py::test_forged_replies_neither_pass_nor_exclude",
        ),
    ),
    44: Row(
        "a poisoned answer, then an honest wrong one in the same process",
        "the honest wrong one scores 0",
        (
            "rewards/graders/test_poison.py::test_a_poisoned_sample_does_not_help_the_next",
            "rewards/graders/test_poison.py::test_hostile_text_scores_zero_and_its_process_goes_on",
        ),
    ),
    45: Row(
        "completions with terminal escapes, scripts, markup, megabytes",
        "console and report show text, cut",
        (
            "observe/test_console.py::test_control_characters_and_markup_do_not_reach_the_terminal",
            "observe/report/test_page.py::test_what_the_model_and_the_data_wrote_is_text",
            "observe/report/test_page.py::test_invisible_characters_are_shown",
            "observe/report/test_samples.py::test_long_completions_are_cut_and_counted",
            "util/test_errors.py::test_the_command_line_prints_them_so",
        ),
    ),
    46: Row(
        "tokens of control and marks of a chat template in the text of a prompt or an answer",
        "text, spelt letter by letter",
        (
            "data/test_tokenizer.py::test_a_prompt_spells_control_tokens_letter_by_letter",
            "data/test_tokenizer.py::test_a_completion_is_learnt_as_text_and_ends_once",
            "data/test_tokenizer.py::test_an_answer_adds_no_turn_for_a_reward_model",
        ),
    ),
    47: Row("requests that attack a server", "", absent=NO_SERVER),
    48: Row("a server's routes for administrators", "", absent=NO_SERVER),
    49: Row(
        "secrets in the environment, in options of a reward, in what it raises",
        "in no file of the run, no line and no figure; an option takes them as env:NAME, and one "
        "that stands in the recipe is told of",
        (
            "faults/test_secrets.py::test_the_environment_is_written_nowhere",
            "faults/test_secrets.py::test_a_key_of_a_reward_stands_in_the_environment_alone",
            "faults/test_secrets.py::test_a_key_that_stands_in_the_recipe_is_told_of",
        ),
    ),
    50: Row(
        "paths that lead out: shards, links, lists and READMEs of datasets, links in a run's place",
        "refused by name (output and reward are the user's own words; no archive is read)",
        (
            "models/test_checkpoint_files.py::test_index_and_files_that_disagree",
            "models/test_hub.py::test_an_index_of_the_hub_that_names_a_file_outside",
            "data/test_hugging_face.py::test_a_readme_that_names_other_places_is_refused",
            "data/test_hugging_face.py::test_a_link_that_leads_outside_is_refused",
            "data/test_hugging_face.py::test_a_saved_dataset_that_names_other_places_is_refused",
            "store/test_directory.py::test_links_in_the_place_of_a_run_s_files_are_refused",
        ),
    ),
}
