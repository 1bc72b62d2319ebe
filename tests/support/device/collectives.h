#pragma once

#include "sim.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// A process group for tensors of the device, carried by `gloo`. If it blocks the host, waiting for a collective returns
// when it is done, and raises what went wrong; else at once, as NCCL does.
c10::intrusive_ptr<c10d::Backend> collectives(c10::intrusive_ptr<c10d::Backend> gloo, bool blocks_host);

}  // namespace sim
