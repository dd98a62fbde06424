// How much of a matrix is zero, from a sample of its elements, rows and columns: for products that compute with zeros.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

namespace {

struct Zeros {  // of what a product was given each time that it was looked at
    static constexpr int64_t SMALLEST = 4096, LONGEST = 8192;  // elements of a matrix, and of a row, that are looked at
    static constexpr uint32_t PROBES = 64, FEW = 16, LINES = 32, LOOKS = 2;

    uint32_t looks = 0;    // that found some of it to be zero, and some not
    bool dense = false;    // one look at least found hardly any zeros; there are no others from then on
    float elements = 0, lines = 0;  // shares of zeros, and of rows or columns that are all zero, over all looks

    void look(const at::Tensor& given) {
        if (dense || !readable(given)) return;
        switch (given.scalar_type()) {
            case at::kFloat: return sample<uint32_t>(given);
            case at::kDouble: return sample<uint64_t>(given);
            case at::kBFloat16:
            case at::kHalf: return sample<uint16_t>(given);
            default: dense = true;
        }
    }

    // Words on it for the text of a call's arguments; none where most is no zero, or where it was looked at too seldom:
    // what a training begins with says little.
    std::string spelled(int argument) const {
        if (dense || looks < LOOKS || elements / looks < 0.5f) return "";
        char text[96];
        std::snprintf(text, sizeof text, "; argument %d is %.3g%% zeros, as are %.2g%% of its rows or columns", argument,
                      100. * elements / looks, 100. * lines / looks);
        return text;
    }

  private:
    static bool readable(const at::Tensor& given) {
        if (!given.defined()) return false;
        auto* impl = given.unsafeGetTensorImpl();
        using enum c10::DispatchKey;
        constexpr c10::DispatchKeySet others(
            {Python, Fake, ZeroTensor, Conjugate, Negative, Functionalize, FuncTorchBatched, FuncTorchGradWrapper});
        return impl->layout() == at::kStrided && given.has_storage() && given.device().is_cpu() &&
               !impl->has_symbolic_sizes_strides() && !impl->key_set().has_any(others) &&
               !impl->is_python_dispatch() && given.storage().data() && (given.dim() == 2 || given.dim() == 3);
    }

    static int64_t somewhere(uint32_t number, uint32_t salt, int64_t of) {
        return int64_t(uint64_t((number + 1) * 2654435761u ^ salt * 2246822519u) * uint64_t(of) >> 32);
    }

    template <typename Bits>
    void sample(const at::Tensor& given) {
        auto last = size_t(given.dim() - 1);
        int64_t sizes[] = {given.size(last - 1), given.size(last)}, strides[] = {given.stride(last - 1), given.stride(last)};
        if (sizes[0] * sizes[1] < SMALLEST || !given.numel()) {
            dense = true;
            return;
        }
        auto* start = static_cast<const Bits*>(given.storage().data()) + given.storage_offset();
        if (last == 2) start += given.size(0) / 2 * given.stride(0);
        auto nonzero = [&](int64_t row, int64_t column) {  // whatever its sign
            return Bits(start[row * strides[0] + column * strides[1]] << 1) != 0;
        };
        uint32_t found = 0;
        for (uint32_t i = 0; i < PROBES; i++) found += nonzero(somewhere(i, 1, sizes[0]), somewhere(i, 2, sizes[1]));
        if (found > FEW) {
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
        if (!filled) return;  // such as a state before its first step
        looks++;
        elements += 1 - float(filled) / float(seen);
        lines += float(std::max(empty[0], empty[1])) / LINES;
    }
};

}  // namespace
