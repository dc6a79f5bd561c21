"""What the library promises and the faults it is built against, each with the tests that hold it.

PROMISES follows the ops' contract from its tables to bad input; FAULTS has one row for a kind of fault that users of
other LoRA stacks reported. A test is `file::function` (file without `test_` and `.py`). A row that only a GPU can hold
says so: ON_GPU. test_contract_rows.py checks that every test exists.
"""

from __future__ import annotations

ON_GPU = "on a GPU"

PROMISES: dict[str, tuple[str, ...]] = {
    # dense and grouped ops
    "every op has a function, a reference of the same name and a registered schema": (
        "contract::test_ops_are_registered_once_and_only_in_the_library",
        "readme::test_every_op_is_in_the_table_with_its_arguments",
    ),
    "shrink is x Aᵀ in float32": ("shrink::test_exact", "fuzz::test_ops"),
    "expand and expand_ are base + scaling · h Bᵀ": ("expand::test_exact", "fuzz::test_ops"),
    "delta and delta_ are base + scaling · (x Aᵀ) Bᵀ": ("delta::test_exact", "fuzz::test_ops"),
    "linear is x Wᵀ + bias + delta": ("linear::test_exact", "fuzz::test_ops"),
    "x may be bf16, fp16, fp32, on the CPU float64 too": (
        "delta::test_exact",
        "autograd::test_gradcheck",
        "checks::test_value_errors",
    ),
    "any strides, offsets and slices of wider buffers": (
        "delta::test_layouts",
        "shrink::test_layouts",
        "expand::test_layouts",
        "fuzz::test_ops",
    ),
    "A is shared by the groups or one for each; x is shared by the groups or not": (
        "delta::test_exact",
        "linear::test_exact",
    ),
    "B is [L, N, r], [L, G, N, r] or, with out_sizes, [L, ΣN, r]": (
        "delta::test_slices",
        "expand::test_slices",
        "edges::test_an_empty_slice",
    ),
    "a checkpoint's group-major B is a view": (
        "adapters::test_stack_groups_are_group_major_and_a_range_of_them_is_a_slice",
        "readme::test_the_usage_example_runs_and_means_what_it_says",
    ),
    "linear's weight is used where it lies": ("linear::test_layouts",),
    "ids are int32 or int64, in any order, with any stride": (
        "delta::test_ids_of_either_dtype_and_any_stride",
        "delta::test_unsorted_ids",
    ),
    "scalings are float32, one a slot": (
        "expand::test_scaling_multiplies_in_float32_and_one_rounding_joins_base",
        "checks::test_value_errors",
    ),
    "what lies past a slot's rank is never used": (
        "shrink::test_nothing_past_the_rank_is_read",
        "delta::test_exact",
        "expert_mlp::test_rank_tails_are_never_used",
        "fuzz::test_ops",
    ),
    "base is returned plus delta as a new tensor, out is updated in place": (
        "autograd::test_in_place_ops_bump_the_version_and_refuse_gradients",
        "fuzz::test_ops",
    ),
    "without base the result has x's dtype, expand's lora_b's": ("fuzz::test_ops", "expand::test_exact"),
    "linear rounds once": ("linear::test_one_rounding", "linear::test_a_float32_bias"),
    "rows without an adapter keep base's bits, NaN in x or not": (
        "delta::test_a_zero_delta_leaves_the_bits_of_base",
        "delta::test_rows_without_an_adapter_beside_a_broken_one",
        "linear_cuda::test_what_is_not_finite_stays_with_its_adapter",
        "stream_cuda::test_what_is_not_finite_stays_with_its_adapter",
    ),
    "shrink writes exact zeros for such rows and past the rank": (
        "shrink::test_rows_without_an_adapter_are_zero_whatever_x_holds",
        "shrink::test_exact",
    ),
    "a plan of a wrong size or dtype is refused": (
        "checks::test_value_errors",
        "expert_checks::test_value_errors",
    ),
    "one plan serves every dense op and layout": (
        "delta::test_the_same_plan_serves_every_layout",
        "linear::test_one_plan_serves_every_layout",
    ),
    "a group receives its own input's product only": ("delta::test_only_its_own_group_reaches_a_group",),
    "groups multiply no launch and no tile; nothing of size G × G exists": (
        "contract::test_groups_cost_no_launch_no_tile_and_no_square",
    ),
    # expert ops
    "x has a row for a token or for a route": ("expert_delta::test_delta_is_exact_on_small_integers", "fuzz::test_ops"),
    "−1 and E are masked: a zero row or base's bits": (
        "expert_empty::test_nothing_routed",
        "expert_empty::test_masked_routes_between_others",
        "expert_kernels::test_nothing_routed_keeps_bases_bits",
    ),
    "packed, interleaved, halved and transposed weights come in as views": (
        "expert_delta::test_base_weights_lie_where_they_lay",
        "expert_mlp::test_base_storage",
        "expert_kernels::test_linear_forms",
    ),
    "an ungated activation takes [E, I, H]": ("expert_parent::test_zero_adapters_are_the_parent", "fuzz::test_ops"),
    "an expert dimension of 1 is shared by all experts": (
        "expert_delta::test_a_shared_factor_is_its_copies",
        "expert_kernels::test_shared_factors",
        "expert_empty::test_a_rank_without_experts_takes_shared_factors",
    ),
    "gate and up may have an A each": ("expert_mlp::test_adapters_are_merged_weights", "expert_kernels::test_delta"),
    "adapter_ids None is slot 0 for every row": (
        "expert_checks::test_the_arguments_that_the_sentences_change_are_good",
        "fuzz::test_ops",
    ),
    "LoRA pairs may be None, both None is the parent": (
        "expert_parent::test_zero_adapters_are_the_parent",
        "expert_mlp::test_one_projection_alone",
    ),
    "four activations, clamps, and no clamp with the other two": (
        "expert_parent::test_zero_adapters_are_the_parent",
        "expert_parent::test_gradients_at_the_clamp",
        "expert_checks::test_words_and_numbers",
    ),
    "the router weight acts at input, pre_down or post_down": (
        "expert_parent::test_where_the_weight_acts",
        "expert_parent::test_post_down_hides_the_weight_from_down",
    ),
    "down's bias: weighted under pre_down and post_down, not under input": ("expert_parent::test_downs_bias",),
    "expert_plan lists routes by expert and slot, in tiles": ("expert_plan::test_random", "fuzz::test_plans"),
    # numbers
    "h is not rounded to x's dtype": (
        "shrink::test_the_cases_catch_a_rounded_h",
        "delta::test_the_cases_catch_a_rounded_h",
    ),
    "delta joins base in float32 and is rounded once": (
        "expand::test_scaling_multiplies_in_float32_and_one_rounding_joins_base",
        "expert_delta::test_one_rounding",
    ),
    "expert_mlp's stages are rounded once each": (
        "expert_mlp::test_exact_on_small_integers",
        "expert_mlp_kernels::test_exact",
        "fuzz::test_ops",
    ),
    "under post_down the weighted routes are not rounded before their sum": (
        "expert_parent::test_float32_weights_keep_their_bits",
    ),
    "routes are summed in slot order": ("expert_parent::test_the_sum_over_k_is_in_slot_order",),
    "row weights multiply the delta alone, and all of expert_linear": (
        "expert_delta::test_row_weights_multiply_the_delta_alone_and_all_of_linear",
    ),
    "the same call gives the same bits": (
        "delta::test_a_second_run_has_the_same_bits",
        "expert_mlp::test_many_runs_one_result",
        "wgrad::test_a_second_run_has_the_same_bits",
    ),
    "zero adapters change no bit": (
        "delta::test_a_zero_delta_leaves_the_bits_of_base",
        "linear::test_zero_adapters_change_nothing",
        "expert_parent::test_zero_adapters_are_the_parent",
        "expert_mlp_kernels::test_zero_adapters_change_no_bit",
        "expert_parent::test_the_sign_of_zero_survives_a_zero_delta",
    ),
    "a row's bits are its own": (
        "contract::test_what_fixes_a_rows_bits_does_not_depend_on_the_batch",
        "capture::test_a_rows_bits_are_its_own",
        "delta::test_every_choice_gives_the_same_bits",
        "expert_kernels::test_a_rows_bits_are_its_own",
        "wgrad::test_dx_of_a_row_is_its_own",
        "linear_gpu::test_a_rows_bits_are_its_own",
        "linear_gpu::test_e8m0_rows_have_the_bits_of_the_weight_in_bf16",
        "linear_cuda::test_a_rows_bits_are_its_own",
        "linear_cuda::test_the_bits_of_the_triton_kernels",
        "stream_cuda::test_the_bits_of_the_triton_kernels",
        "stream_cuda::test_every_number_of_rows",
        "linear_cuda::test_the_bits_of_expert_mlp",
        "expert_mixed::test_the_bits_of_other_tiles",
        "expert_mixed::test_random_rows_have_the_bits_of_other_tiles",
    ),
    "kernels are held to the reference and to float64": (
        "delta::test_close_to_float64",
        "linear::test_no_further_from_float64_than_torch",
        "expert_mlp_kernels::test_close_to_float64",
        "fuzz::test_kernels_in_the_interpreter",
    ),
    # zero tokens and empty routes
    "no tokens and no routes: usual shape, exact zeros, gradients that are there": (
        "autograd::test_empty_batches_stay_connected",
        "expert_empty::test_nothing_routed",
        "expert_empty::test_nothing_routed_in_the_projections",
        "linear_attack::test_tiles_of_masked_routes_behind_each_other",
        "linear_cuda::test_masked_routes_behind_few_others",
        "linear::test_empty_batches_stay_connected",
        "edges::test_sizes_of_zero_and_one",
    ),
    "empty slots and experts get gradients of exact zeros": (
        "wgrad::test_empty_slots_get_exact_zeros",
        "expert_kernels::test_pairs_without_routes_get_exact_zeros",
        "expert_empty::test_empty_experts",
    ),
    "frozen inputs get None": (
        "autograd::test_gradients_only_where_asked_for",
        "expert_empty::test_gradients_are_none_where_nothing_is_asked_for",
    ),
    "no op waits for the device": (
        "capture::test_no_op_waits_for_the_device",
        "expert_gpu::test_no_op_synchronises",
        "linear_gpu::test_it_never_waits_for_the_device",
        ON_GPU,
    ),
    # autograd
    "everything differentiable has its gradient": (
        "wgrad::test_exact",
        "linear::test_exact_gradients",
        "expert_mlp::test_exact_gradients_on_small_integers",
        "fuzz::test_ops",
    ),
    "gradients are summed in float32 and cast once": (
        "wgrad::test_close_to_float64",
        "expert_mlp::test_float32_masters",
    ),
    "second derivatives raise": (
        "autograd::test_second_derivatives_raise",
        "linear::test_second_derivatives_raise",
        "expert_autograd::test_second_derivatives_raise",
    ),
    "forward-mode derivatives raise": ("autograd::test_forward_mode_raises_and_leaves_what_has_no_tangent",),
    "results and gradients have the strides that a compiler is told": (
        "autograd::test_results_and_gradients_have_the_strides_that_a_compiler_is_told",
        "expert_autograd::test_results_and_gradients_have_the_strides_that_a_compiler_is_told",
    ),
    "opcheck passes": (
        "autograd::test_opcheck",
        "autograd::test_opcheck_of_nothing",
        "linear::test_opcheck",
        "expert_autograd::test_opcheck",
    ),
    "compiled whole, and once for every T": (
        "autograd::test_compile_traces_whole_and_once_for_every_length",
        "autograd::test_compile_plans_and_ops_in_place_for_every_length",
        "linear::test_compile_traces_whole_and_once_for_every_length",
        "expert_autograd::test_compile_the_mlp",
        "expert_autograd::test_compile_the_projections",
    ),
    "autocast": (
        "autograd::test_autocast_casts_and_gradients_come_back_in_their_own_dtype",
        "linear::test_autocast",
        "expert_autograd::test_autocast",
    ),
    "activation checkpointing": (
        "autograd::test_activation_checkpointing",
        "expert_empty::test_activation_checkpointing",
    ),
    "CUDA gradients are ours": (
        "wgrad::test_gradients_on_a_gpu_are_ours_and_the_references",
        "linear_gpu::test_gradients_are_ours",
        "expert_gpu::test_gradients_on_a_gpu_are_ours_and_the_references",
        ON_GPU,
    ),
    # CUDA graphs
    "nothing is compiled inside a capture, and the capture can be retried": (
        "cuda::test_nothing_is_loaded_inside_a_capture_and_the_capture_can_be_retried",
        "capture::test_a_first_call_inside_a_capture_raises_and_the_capture_can_be_retried",
        "graphs::test_a_first_call_inside_a_capture_names_its_op",
        "expert_gpu::test_a_first_call_inside_a_capture_names_its_op",
    ),
    "a replay follows ids, routes, scalings, ranks and weights": (
        "capture::test_replays_follow_ids_weights_and_scalings",
        "expert_gpu::test_a_replay_follows_the_routing",
        "bank::test_a_captured_graph_follows_swaps",
        "nn::test_a_graph_of_the_modules_follows_ids_and_adapters",
        ON_GPU,
    ),
    "a warm-up leaves nothing to compile": (
        "warmup::test_nothing_is_left_to_compile",
        "expert_warmup::test_nothing_is_left_to_compile",
        "capture::test_nothing_is_compiled_after_warmup",
    ),
    # bad input
    "ValueError or TypeError in one sentence, before anything is written": (
        "checks::test_value_errors",
        "checks::test_type_errors",
        "checks::test_integers_that_are_none",
        "checks::test_sparse_tensors_are_refused",
        "checks::test_nothing_is_written_when_a_check_fails",
        "expert_checks::test_value_errors",
        "expert_checks::test_type_errors",
        "linear::test_sentences",
        "fuzz::test_bad_input_is_refused_in_one_sentence",
    ),
    "ids out of range raise on the CPU and count as −1 on a GPU": (
        "plan::test_out_of_range_ids_raise_on_the_cpu",
        "delta::test_ids_out_of_range_count_as_none",
        "expert_mlp::test_stray_ids_raise_on_the_cpu",
        "expert_kernels::test_ids_out_of_range_are_masked",
    ),
    "GROUPED_LORA_CHECK=1 checks them on a GPU": (
        "checks::test_checked_values_where_asked_for",
        "expert_checks::test_checked_values_where_asked_for",
    ),
    "offsets pass 2³¹": (
        "capture::test_offsets_pass_two_to_the_31",
        "shrink::test_rows_beyond_2_to_the_31_elements",
        "expert_gpu::test_rows_beyond_2_to_the_31_elements",
        ON_GPU,
    ),
}

FAULTS: dict[str, tuple[str, ...]] = {
    # indexing
    "1: row offsets wrap at 2³¹": (
        "shrink::test_rows_beyond_2_to_the_31_elements",
        "expand::test_rows_beyond_2_to_the_31_elements",
        "delta::test_rows_beyond_2_to_the_31_elements",
        "wgrad::test_rows_beyond_2_to_the_31_elements",
        "linear_gpu::test_rows_beyond_2_to_the_31_elements",
        "linear_gpu::test_an_e4m3_weight_beyond_2_to_the_31_elements",
        "expert_gpu::test_rows_beyond_2_to_the_31_elements",
        "graphs::test_hundreds_of_thousands_of_rows_past_2_to_the_31_elements",
        ON_GPU,
    ),
    "3: a masked expert id of −1 reads out of bounds": (
        "expert_empty::test_masked_routes_between_others",
        "expert_kernels::test_ids_out_of_range_are_masked",
    ),
    "4: −1 lands on the previous adapter's last expert": (
        "expert_mlp::test_1024_experts",
        "expert_kernels::test_nothing_routed_keeps_bases_bits",
    ),
    "5: id E": (
        "expert_empty::test_nothing_routed",
        "expert_mlp::test_stray_ids_raise_on_the_cpu",
        "expert_kernels::test_ids_out_of_range_are_masked",
    ),
    "6: a slot of rank 0 beside others": ("delta::test_a_zero_delta_leaves_the_bits_of_base", "fuzz::test_ops"),
    "8: a resident adapter that no row uses": (
        "wgrad::test_empty_slots_get_exact_zeros",
        "edges::test_sizes_of_zero_and_one",
        "plan::test_extremes",
    ),
    "9: adapters in order of appearance, not of id": (
        "plan::test_unsorted",
        "delta::test_unsorted_ids",
        "fuzz::test_plans",
    ),
    "11: all slots in use beside rows without one": (
        "delta::test_many_slots",
        "shrink::test_many_slots",
        "fuzz::test_ops",
    ),
    "12: inputs that are not contiguous": (
        "shrink::test_layouts",
        "expand::test_layouts",
        "delta::test_layouts",
        "expert_kernels::test_layouts",
    ),
    "14: strides assumed, or hidden copies of packed weights": (
        "expert_delta::test_halves_of_packed_factors_are_views",
        "expert_delta::test_base_weights_lie_where_they_lay",
    ),
    # numbers
    "16: the tail of a smaller adapter in a used slot": (
        "shrink::test_nothing_past_the_rank_is_read",
        "bank::test_nothing_of_an_earlier_adapter_is_left",
    ),
    "17, 18: ranks that are not multiples of 16": (
        "shrink::test_every_rank",
        "expand::test_every_rank",
        "delta::test_every_rank",
        "wgrad::test_every_rank",
        "linear::test_every_rank",
        "expert_kernels::test_ranks",
    ),
    "20: one row, or ranks under 16, in tl.dot": (
        "compile::test_they_fit",
        "expert_compile::test_they_fit",
        "delta::test_every_count",
    ),
    "22: the last columns where N is no multiple of a tile": (
        "expand::test_every_width",
        "delta::test_every_width",
        "linear::test_every_width",
    ),
    "23: h rounded on the way; fp16 taken for bf16": (
        "shrink::test_the_cases_catch_a_rounded_h",
        "delta::test_exact",
        "shrink::test_chunk_sums_cancel_as_in_float32",
    ),
    "24: other bits in another batch, or in another run": (
        "delta::test_a_second_run_has_the_same_bits",
        "capture::test_a_rows_bits_are_its_own",
        "contract::test_what_fixes_a_rows_bits_does_not_depend_on_the_batch",
    ),
    "25: rows without an adapter change": (
        "delta::test_a_zero_delta_leaves_the_bits_of_base",
        "expert_kernels::test_a_zero_delta_keeps_bases_bits",
    ),
    # experts
    "26: a zero adapter changes the parent": (
        "expert_parent::test_zero_adapters_are_the_parent",
        "nn_models::test_a_zero_adapter_changes_no_bit",
    ),
    "27: router weights narrowed before their product": (
        "expert_parent::test_float32_weights_keep_their_bits",
        "expert_mlp_kernels::test_a_weight_of_more_bits_than_bf16_keeps_them",
    ),
    "29: gate and up deltas added behind the activation": ("expert_mlp::test_lora_joins_before_the_activation",),
    "31: the order of the sum over k": (
        "expert_parent::test_the_sum_over_k_is_in_slot_order",
        "expert_mlp::test_many_runs_one_result",
    ),
    # autograd
    "32: gradients of empty experts never written": (
        "expert_kernels::test_pairs_without_routes_get_exact_zeros",
        "wgrad::test_empty_slots_get_exact_zeros",
        "expert_empty::test_empty_experts",
    ),
    "34: a backward that hangs on empty experts": ("expert_empty::test_backwards_with_empty_experts_finish",),
    "35: no tokens, eager and compiled, forward and backward": (
        "autograd::test_empty_batches_stay_connected",
        "autograd::test_compile_traces_whole_and_once_for_every_length",
        "expert_empty::test_nothing_routed",
    ),
    "36: a rank without tokens": ("ddp::test_a_rank_without_tokens", "expert_ddp::test_a_rank_without_tokens"),
    "37: factors without gradients": (
        "expert_mlp::test_every_factor_that_is_routed_gets_a_gradient",
        "expert_mlp::test_one_projection_alone",
    ),
    "38: any subset of operands trained": (
        "autograd::test_gradients_only_where_asked_for",
        "expert_kernels::test_only_what_is_asked_for",
        "fuzz::test_ops",
    ),
    "40: a silently wrong second derivative": (
        "autograd::test_second_derivatives_raise",
        "expert_autograd::test_second_derivatives_raise",
    ),
    "41: mixed dtypes of activations, adapters and gradients": (
        "autograd::test_autocast_casts_and_gradients_come_back_in_their_own_dtype",
        "expert_kernels::test_float32_master_copies",
        "checks::test_value_errors",
        "nn::test_float32_masters_take_part_rounded_and_get_float32_gradients",
    ),
    # graphs
    "43: captured with few adapters, replayed with more": (
        "capture::test_replays_follow_ids_weights_and_scalings",
        "graphs::test_ops_in_place_follow_ids",
        ON_GPU,
    ),
    "44, 45: metadata and scratch that a replay finds gone or shared": (
        "capture::test_a_plan_made_inside_the_graph_serves_two_layers",
        "graphs::test_a_captured_training_step",
        "host::test_a_plan_made_inside_a_call_is_made_again",
    ),
    "47: one metadata tensor read in two ways": (
        "delta::test_the_same_plan_serves_every_layout",
        "expert_kernels::test_a_given_plan_is_read",
    ),
    "49: host-side flags frozen by a capture": (
        "capture::test_replays_follow_ids_weights_and_scalings",
        "expert_gpu::test_a_replay_follows_the_routing",
        "expert_host::test_a_captured_repetition_follows_ids_and_weights",
        ON_GPU,
    ),
    "50, 52: compiling or tuning inside a capture or while serving": (
        "capture::test_a_first_call_inside_a_capture_raises_and_the_capture_can_be_retried",
        "capture::test_nothing_is_compiled_after_warmup",
        "warmup::test_nothing_is_left_to_compile",
    ),
    "53: the wrong stream": (
        "capture::test_a_side_stream_is_followed",
        "host::test_a_repeated_delta_reads_and_writes_its_own_tensors",
        "host::test_prepared_calls_follow_streams_captures_and_threads",
    ),
    "54: the wrong current device, mixed devices": (
        "capture::test_tensors_of_another_gpu_than_the_current_one",
        "contract::test_every_op_makes_its_tensors_device_the_current_one",
        "host::test_a_call_is_repeated_on_the_device_of_its_tensors",
        "host::test_every_op_on_the_gpu_of_its_tensors",
        "expert_host::test_a_call_is_repeated_on_the_device_of_its_tensors",
        "expert_host::test_prepared_calls_of_two_devices",
        "host_train::test_a_backward_is_repeated_on_the_device_of_its_tensors",
        "host::test_another_context_is_made_current_for_the_launch",
        "checks::test_devices_may_not_mix",
    ),
    # compiling
    "55: an input or a view returned": (
        "autograd::test_opcheck_of_nothing",
        "host::test_results_are_new_and_memory_is_held_by_nobody",
        "host_train::test_gradients_are_new_and_start_from_zeros",
    ),
    "56, 58: recompiles, graph breaks and data-dependent sizes": (
        "autograd::test_compile_traces_whole_and_once_for_every_length",
        "expert_autograd::test_compile_the_mlp",
        "nn::test_training_is_compiled_whole",
    ),
    "59: hidden waits for the device": (
        "capture::test_no_op_waits_for_the_device",
        "expert_gpu::test_no_op_synchronises",
        ON_GPU,
    ),
    "60: the host's time for a call": (
        "bench::test_every_suite_runs_at_tiny_sizes",
        "host::test_shrink_expand_and_plan_are_repeated",
        "expert_host::test_a_repeated_mlp_reads_and_writes_its_own_tensors",
        "host_train::test_a_repeated_backward_reads_and_writes_its_own_tensors",
        "host_train::test_a_repeated_layer_of_experts",
    ),
    "61: programmatic dependent launch": (
        "host::test_programmatic_dependent_launch_is_recorded",
        "capture::test_ten_thousand_replays_under_programmatic_dependent_launch",
    ),
    "63: the interpreter's bf16 products": ("shrink::test_exact", "delta::test_exact"),
    # distributed
    "64: weights of all groups beside inputs of some": ("checks::test_value_errors",),
    "65: cross terms between groups": (
        "delta::test_only_its_own_group_reaches_a_group",
        "contract::test_groups_cost_no_launch_no_tile_and_no_square",
    ),
    "67: ranks that do not divide": ("sharding::test_what_does_not_divide_is_refused", "bank::test_a_ranks_share"),
    "69: gradients summed over the wrong ranks": ("layouts::test_gradient_sums", "sharding::test_two_processes"),
    "70: shards built against whole sizes": ("sharding::test_two_processes", "layouts::test_shares_that_do_not_divide"),
    # loading
    "71: rank columns of PEFT's expert B": (
        "adapters_experts::test_columns_of_b_are_rank_major",
        "adapters_peft::test_expert_pairs_are_what_peft_makes_of_them",
    ),
    "72, 73: layouts guessed from shapes": (
        "adapters_experts::test_square_factors_without_a_version_are_refused",
        "expert_mlp::test_base_storage",
    ),
    "75: shared-outer factors": (
        "expert_delta::test_a_shared_factor_is_its_copies",
        "adapters_experts::test_shared_outer_factors",
        "expert_kernels::test_gradients_of_shared_factors",
    ),
    "76: scalings of many forms": (
        "adapters::test_shipped_rslora",
        "adapters::test_any_finite_alpha",
        "expand::test_scaling_multiplies_in_float32_and_one_rounding_joins_base",
    ),
    "77: swapped adapters that a graph does not see": (
        "bank::test_addresses_never_change_and_a_slot_is_swapped_in_place",
        "capture::test_replays_follow_ids_weights_and_scalings",
    ),
    # installing
    "78: no compiler, a home that cannot be written": (
        "package::test_it_imports_and_runs_on_a_bare_machine",
        "cuda::test_a_cache_that_cannot_be_written_is_no_error",
    ),
    "79: headers, architectures and compilers that do not fit": (
        "cuda::test_compilers_that_fail_are_named",
        "cuda::test_a_gpu_without_a_build",
        "cuda::test_nvrtc_compiles_what_nvcc_compiles",
    ),
    "80: a GPU that is not supported": (
        "cuda::test_which_build_runs_on_which_gpu",
        "doctor::test_a_gpu_that_torch_cannot_use_is_an_error",
    ),
    "81: a library product that is not there": ("contract::test_no_op_needs_torchs_grouped_product",),
    # speed: what decides it is tested, what it is stands in the benchmarks
    "82: cost grows with slots and buffers, not with use": (
        "bench::test_only_true_ranks_and_rows_with_an_adapter_cost_anything",
        "contract::test_tile_count_bounds_what_any_ids_make",
        "bench::test_mixes",
    ),
    "83: the cost of adapters that nobody uses": (
        "bench::test_every_suite_runs_at_tiny_sizes",
        "nn::test_no_adapter_and_a_zero_one_change_no_bit",
    ),
    "85: a GPU without a table": (
        "contract::test_every_problem_gets_a_configuration",
        "contract::test_a_launch_table_comes_first_and_may_not_change_bits",
    ),
}
