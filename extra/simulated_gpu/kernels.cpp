// torch's operations on a GPU, computed by those of the CPU.
//
// torch finds an operation's kernel in a table, by its name and by a key: CPU, CUDA, ... Here the entries at the key CUDA
// are replaced. The new kernel makes CPU tensors of the same memory, calls the entry at the key CPU, and puts results
// into GPU tensors. Everything above stays torch's own: autograd, views, allocation, streams, copies between devices.
#include "simulated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/irange.h>

#include <set>

using at::Tensor;
using torch::jit::Stack;

static bool on_gpu(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// Bytes from the first to the last element; with `offset`, from an element that is so many before the first.
static size_t span(const Tensor& tensor, size_t offset = 0) {
    return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(), offset);
}

// A CPU tensor on the memory of a GPU's tensor.
static Tensor alias(const Tensor& tensor, const std::string& name) {
    auto options = tensor.options().device(at::kCPU);
    if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    int device = -1;
    size_t end = span(tensor, tensor.storage_offset());
    TORCH_CHECK(tensor.storage().nbytes() >= end, name, " uses a tensor of shape ", tensor.sizes(),
                " whose memory was freed: its storage has ", tensor.storage().nbytes(), " bytes and it needs ", end);
    void* memory = simulated_memory(tensor.data_ptr(), span(tensor), &device);
    TORCH_CHECK(memory, name, " uses a tensor of shape ", tensor.sizes(), " in what is no memory of a GPU: ", simulated_error());
    return at::from_blob(memory, tensor.sizes(), tensor.strides(), options);
}

static Access access_to(const Tensor& tensor, bool writes) {
    return {tensor.data_ptr(), span(tensor), writes, c10::str(c10::toString(tensor.scalar_type()), tensor.sizes())};
}

static void tell(const std::string& name, const std::vector<Access>& accesses) {
    simulated_operation(c10::cuda::getCurrentCUDAStream(), name, accesses);
}

// A CPU's generator in the place of a GPU's: other numbers at each call, and the same ones after the same seed.
static at::Generator dice(const at::Generator& gpu) {
    auto [seed, offset] = gpu.get<at::CUDAGeneratorImpl>()->philox_engine_inputs(4);
    return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15 + offset);
}

// The host passes numbers to these kernels, so it waits for them.
static const std::set<std::string> HOST_WAITS = {"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
                                                 "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave",
                                                 "aten::_local_scalar_dense"};  // which is tensor.item()

// Puts `f(tensor)` in the place of each tensor of an argument or result. In a list some may be missing, as in `index`.
template <class F>
static void each_tensor(c10::IValue& value, F f) {
    if (value.isTensor()) value = f(value.toTensor());
    if (!value.isList()) return;
    auto list = value.toList().copy();
    for (auto i : c10::irange(list.size()))
        if (list.get(i).isTensor()) list.set(i, f(list.get(i).toTensor()));
    value = list;
}

static void on_the_cpu(const c10::OperatorHandle& op, Stack* stack) {
    auto& schema = op.schema();
    const std::string& name = schema.name();
    size_t first = stack->size() - schema.arguments().size();
    std::vector<Access> used;
    std::vector<Tensor> kept;  // of a temporary, such as the values of a conjugate, the stack may have the only reference
    std::vector<std::pair<Tensor, Tensor>> replaced;  // (the GPU's, the CPU's) of those that are written
    std::optional<c10::Device> device;
    auto converted = [&](const Tensor& tensor, bool writes) {
        if (!on_gpu(tensor)) {
            bool may = !tensor.defined() || !tensor.dim() || name.find("index") != std::string::npos || name.find("_foreach") != std::string::npos;
            TORCH_CHECK(may, "Expected all tensors to be on the same device: ", name, " was given one of shape ", tensor.sizes(), " on the CPU");
            return tensor;
        }
        TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device: ", name,
                    " was given some on ", *device, " and on ", tensor.device());
        device = tensor.device();
        Tensor mine = alias(tensor, name);
        kept.push_back(tensor);
        used.push_back(access_to(tensor, writes));
        if (writes) replaced.push_back({tensor, mine});
        return mine;
    };
    for (auto i : c10::irange(schema.arguments().size())) {
        auto& value = (*stack)[first + i];
        auto* info = schema.arguments()[i].alias_info();
        bool writes = info && info->isWrite();
        each_tensor(value, [&](const Tensor& tensor) { return converted(tensor, writes); });
        if (value.isDevice()) {
            device = value.toDevice();
            value = c10::Device(at::kCPU);
        } else if (schema.arguments()[i].name() == "generator") {
            value = dice(value.isNone() ? at::cuda::detail::getDefaultCUDAGenerator() : value.toGenerator());
        }
    }
    c10::cuda::OptionalCUDAGuard guard(device);
    if (device && !device->has_index()) device = c10::Device(at::kCUDA, c10::cuda::current_device());
    tell(name, used);
    {
        at::AutoDispatchBelowAutograd below;
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    for (auto& [tensor, mine] : replaced) {  // `out=` that has grown
        if (tensor.sizes() == mine.sizes()) continue;
        tensor.resize_(mine.sizes());
        if (mine.numel()) alias(tensor, name).copy_(mine), tell(name, {access_to(tensor, true)});
    }
    auto result = [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        for (auto& [original, mine] : replaced)
            if (mine.is_same(tensor)) return original;
        Tensor out = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*device).pinned_memory(false));
        if (out.numel()) alias(out, name).copy_(tensor), tell(name, {access_to(out, true)});
        return out;
    };
    for (auto i : c10::irange(stack->size() - schema.returns().size(), stack->size())) each_tensor((*stack)[i], result);
    if (HOST_WAITS.count(name)) c10::cuda::getCurrentCUDAStream().synchronize();
}

// Copies between host and device are torch's own, which come to cudaMemcpyAsync. On one device it would launch a kernel.
static Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
    if (!on_gpu(to) || !on_gpu(from) || to.device() != from.device()) return at::native::copy_(to, from, non_blocking);
    if (to.is_same(from) || !to.numel()) return to;
    c10::cuda::CUDAGuard guard(to.device());
    alias(to, "copy_").copy_(alias(from, "copy_").expand(to.sizes()));
    tell("copy_", {access_to(from, false), access_to(to, true)});
    return to;
}

// An operation that the CPU does not have. torch's own entry would launch a kernel, and there is nothing to run it.
static void missing(const c10::OperatorHandle& op, Stack*) {
    simulated_missing(op.schema().name().c_str());
    TORCH_CHECK(false, simulated_error());
}

// Attention: torch would choose one of several fused operations of a GPU, whose results are others than those of the CPU's.
static Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout,
                        bool causal, std::optional<double> scale, bool grouped) {
    if (grouped) return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, {}, scale, grouped));
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, mask, scale));
}

// What must stay torch's own: it allocates, or looks at tensors without reading their memory.
static const std::set<std::string> KEPT = {"empty", "empty_strided", "resize_", "set_", "is_pinned", "_pin_memory", "is_set_to",
                                           "_efficientzerotensor", "_has_same_storage_numel", "record_stream"};

extern "C" void simulated_kernels() {
    static std::vector<c10::RegistrationHandleRAII> kept;
    auto& table = c10::Dispatcher::singleton();
    c10::WarningUtils::WarningHandlerGuard silent([] {  // torch warns that entries are replaced
        static struct : c10::WarningHandler { void process(const c10::Warning&) override {} } none;
        return &none;
    }());
    auto enter = [&](const c10::OperatorName& name, c10::KernelFunction kernel, c10::DispatchKey key = c10::DispatchKey::CUDA) {
        kept.push_back(table.registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "simulated GPU"));
    };
    auto names = table.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
    names.push_back({"aten::_scaled_dot_product_flash_attention_for_cpu", ""});
    names.push_back({"aten::_scaled_dot_product_flash_attention_for_cpu_backward", ""});
    for (auto& name : names) {
        auto op = table.findSchema(name);
        if (!op || name.name.rfind("aten::", 0) || KEPT.count(name.name.substr(6))) continue;
        bool view = false;  // a result that shares memory with an argument which is not written: nothing is computed
        for (auto& argument : op->schema().arguments()) view |= argument.alias_info() && !argument.alias_info()->isWrite();
        if (view) continue;
        bool on_cpu = op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
        enter(name, on_cpu ? c10::KernelFunction::makeFromBoxedFunction<&on_the_cpu>()
                           : c10::KernelFunction::makeFromBoxedFunction<&missing>());
    }
    enter({"aten::copy_", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&copy));
    for (auto key : {c10::DispatchKey::AutogradCUDA, c10::DispatchKey::CUDA})
        enter({"aten::scaled_dot_product_attention", ""}, c10::KernelFunction::makeFromUnboxedRuntimeFunction(&attention), key);
}

extern "C" void simulated_sleep() { tell("sleep", {}); }  // torch.cuda._sleep: time, and nothing else

// What the caching allocator gives out and gets back. Call it when torch has initialised CUDA: before, there is none.
extern "C" void simulated_allocator() {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const c10::cuda::CUDACachingAllocator::TraceEntry& entry) {
        bool out = entry.action_ == entry.ALLOC, back = entry.action_ == entry.FREE_COMPLETED;
        if (out || back) simulated_given((void*)entry.addr_, entry.size_, (cudaStream_t)entry.stream_, entry.device_, back);
    });
}
