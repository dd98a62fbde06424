// Estimates which fraction of a matrix is zero, from a sample of its elements, rows and columns, to find products that
// compute with zeros.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

namespace {

struct Zeros {  // of one argument of a product, over all calls whose arguments were inspected
    static constexpr int64_t SMALLEST = 4096, LONGEST = 8192;  // elements: of the smallest matrix inspected, and inspected of a row
    static constexpr uint32_t PROBES = 64, FEW = 16, LINES = 32, LOOKS = 2;

    uint32_t looks = 0;    // inspections that found both zeros and other values
    bool dense = false;    // an inspection found hardly any zeros, which ends all further ones
    float elements = 0, lines = 0;  // sums over inspections: fraction of zeros, and of rows or columns that are all zero

    void look(const at::Tensor& tensor) {
        if (dense || !readable(tensor)) return;
        switch (tensor.scalar_type()) {
            case at::kFloat: return sample<uint32_t>(tensor);
            case at::kDouble: return sample<uint64_t>(tensor);
            case at::kBFloat16:
            case at::kHalf: return sample<uint16_t>(tensor);
            default: dense = true;
        }
    }

    // A note for the text of a call's arguments; empty if less than half is zero, or after too few inspections: the
    // first steps of training are not typical.
    std::string spelled(int argument) const {
        if (dense || looks < LOOKS || elements / looks < 0.5f) return "";
        char text[96];
        std::snprintf(text, sizeof text, "; argument %d is %.3g%% zeros, as are %.2g%% of its rows or columns", argument,
                      100. * elements / looks, 100. * lines / looks);
        return text;
    }

  private:
    static bool readable(const at::Tensor& tensor) {
        if (!tensor.defined()) return false;
        auto* impl = tensor.unsafeGetTensorImpl();
        using enum c10::DispatchKey;
        constexpr c10::DispatchKeySet others(
            {Python, Fake, ZeroTensor, Conjugate, Negative, Functionalize, FuncTorchBatched, FuncTorchGradWrapper});
        return impl->layout() == at::kStrided && tensor.has_storage() && tensor.device().is_cpu() &&
               !impl->has_symbolic_sizes_strides() && !impl->key_set().has_any(others) &&
               !impl->is_python_dispatch() && tensor.storage().data() && (tensor.dim() == 2 || tensor.dim() == 3);
    }

    // A pseudorandom index below `of`; the same for each call, so that repeated inspections compare.
    static int64_t somewhere(uint32_t number, uint32_t salt, int64_t of) {
        return int64_t(uint64_t((number + 1) * 2654435761u ^ salt * 2246822519u) * uint64_t(of) >> 32);
    }

    template <typename Bits>
    void sample(const at::Tensor& tensor) {
        auto last = size_t(tensor.dim() - 1);
        int64_t sizes[] = {tensor.size(last - 1), tensor.size(last)}, strides[] = {tensor.stride(last - 1), tensor.stride(last)};
        if (sizes[0] * sizes[1] < SMALLEST || !tensor.numel()) {
            dense = true;
            return;
        }
        auto* start = static_cast<const Bits*>(tensor.storage().data()) + tensor.storage_offset();
        if (last == 2) start += tensor.size(0) / 2 * tensor.stride(0);
        auto nonzero = [&](int64_t row, int64_t column) {  // whatever its sign
            return Bits(start[row * strides[0] + column * strides[1]] << 1) != 0;
        };
        uint32_t nonzeros = 0;
        for (uint32_t i = 0; i < PROBES; i++) nonzeros += nonzero(somewhere(i, 1, sizes[0]), somewhere(i, 2, sizes[1]));
        if (nonzeros > FEW) {
            dense = true;
            return;
        }
        int64_t seen = 0, filled = 0;
        uint32_t empty[2] = {};
        for (uint32_t way = 0; way < 2; way++)
            for (uint32_t i = 0; i < LINES; i++) {
                int64_t line = somewhere(i, 3 + way, sizes[way]), length = std::min(sizes[1 - way], LONGEST), inside = 0;
                for (int64_t j = 0; j < length; j++) inside += way ? nonzero(j, line) : nonzero(line, j);
                empty[way] += !inside;
                seen += length;
                filled += inside;
            }
        if (!filled) return;  // all zero, such as an optimizer's state before its first step
        looks++;
        elements += 1 - float(filled) / float(seen);
        lines += float(std::max(empty[0], empty[1])) / LINES;
    }
};

}  // namespace
